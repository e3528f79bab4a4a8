#include "kernels/common/head_dim.h"
#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/warpgroup.h"
#include "kernels/sm90/forward_f32/forward_f32.h"
#include "kernels/sm90/forward_f32/shape.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <int kHeadDim>
void run_forward_f32(const ForwardParams& params, void* workspace, cudaStream_t stream);

int64_t forward_f32_workspace_bytes(const ForwardParams& params) {
  const int head_dim = forward_f32_head_dim(params.head_dim, params.head_dim_v);
  const int64_t block_m = forward_f32_shape(head_dim).warpgroups * kWarpgroupRows;
  const WorkListPlan list = forward_work_list(params, static_cast<int>(block_m));
  if (list.listed) return list.bytes();
  const int64_t work_tiles = (params.seqlen_q + block_m - 1) / block_m * params.batch * params.heads_q;
  return work_tiles > device_attribute(cudaDevAttrMultiProcessorCount) ? sizeof(unsigned long long) : 0;
}

void forward_f32(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  with_head_dim<64, 128, 192, 256>(forward_f32_head_dim(params.head_dim, params.head_dim_v), [&](auto head_dim) {
    run_forward_f32<decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
