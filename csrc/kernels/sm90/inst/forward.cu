#include "../../launch.h"
#include "../dispatch.h"
#include "../forward.h"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim, int kHeadDimV>
void run_forward(const ForwardParams& params, void* workspace,
                 cudaStream_t stream);  // instantiated in the files beside this one

int64_t forward_workspace_bytes(const ForwardParams& params) {
  const int64_t block_m = forward_shape(forward_head_dims(params.head_dim, params.head_dim_v)).groups * kGroupRows;
  const int64_t works = (params.seqlen_q + block_m - 1) / block_m * params.batch * params.heads_q;
  return works > device_attribute(cudaDevAttrMultiProcessorCount) ? sizeof(unsigned long long) : 0;
}

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  with_forward_types(params, [&](auto element, auto head_dim, auto head_dim_v) {
    run_forward<decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
