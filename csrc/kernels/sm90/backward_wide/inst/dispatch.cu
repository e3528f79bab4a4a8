#include "kernels/sm90/backward_wide/backward_wide.h"
#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_wide_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward_wide(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_wide_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    bytes = backward_head_dim(params.head_dim, params.head_dim_v) == 192 ? backward_wide_bytes<Element, 192>(params)
                                                                         : backward_wide_bytes<Element, 256>(params);
  });
  return bytes;
}

void backward_wide(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    backward_head_dim(params.head_dim, params.head_dim_v) == 192
        ? run_backward_wide<Element, 192>(params, workspace, stream)
        : run_backward_wide<Element, 256>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
