#include "../../common/head_dim.h"
#include "../../launch.h"
#include "../forward_f32.h"
#include "../forward_f32_shape.h"
#include "../forward_shape.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <int kHeadDim>
void run_forward_f32(const ForwardParams& params, void* workspace, cudaStream_t stream);

int64_t forward_f32_workspace_bytes(const ForwardParams& params) {
  const int head_dim = kernel_head_dim(params.head_dim, params.head_dim_v);
  const int64_t block_m = forward_f32_shape(head_dim).groups * kGroupRows;
  const int64_t works = (params.seqlen_q + block_m - 1) / block_m * params.batch * params.heads_q;
  return works > device_attribute(cudaDevAttrMultiProcessorCount) ? sizeof(unsigned long long) : 0;
}

void forward_f32(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  kernel_head_dim(params.head_dim, params.head_dim_v) == 64 ? run_forward_f32<64>(params, workspace, stream)
                                                            : run_forward_f32<128>(params, workspace, stream);
}

}  // namespace flash_ext::sm90
