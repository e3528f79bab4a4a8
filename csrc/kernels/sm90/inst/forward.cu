#include "../../launch.h"
#include "../../ptx/grid_dependency.h"
#include "../dispatch.h"
#include "../forward.h"

namespace flash_ext::sm90 {

__global__ void clear_counter(unsigned long long* counter) {
  ptx::launch_dependents();
  *counter = 0;
}

void clear_forward_workspace(void* workspace, cudaStream_t stream) {
  launch("sm90/forward", clear_counter, {dim3(1), dim3(1)}, stream, static_cast<unsigned long long*>(workspace));
}

template <class Element, int kHeadDim, int kHeadDimV>
void run_forward(const ForwardParams& params, int64_t block_n, void* workspace,
                 cudaStream_t stream);  // instantiated in the files beside this one

int64_t forward_workspace_bytes(const ForwardParams& params) {
  const int64_t block_m = forward_shape(forward_head_dims(params.head_dim, params.head_dim_v)).groups * kGroupRows;
  const int64_t works = (params.seqlen_q + block_m - 1) / block_m * params.batch * params.heads_q;
  return works > device_attribute(cudaDevAttrMultiProcessorCount) ? sizeof(unsigned long long) : 0;
}

void forward(const ForwardParams& params, int64_t block_n, void* workspace, cudaStream_t stream) {
  with_forward_types(params, [&](auto element, auto head_dim, auto head_dim_v) {
    run_forward<decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(params, block_n, workspace,
                                                                                           stream);
  });
}

}  // namespace flash_ext::sm90
