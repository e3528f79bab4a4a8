#include "kernels/sm90/backward_options/backward_options.h"
#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_options_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward_options(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_options_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    bytes = backward_head_dim(params.head_dim, params.head_dim_v) == 64 ? backward_options_bytes<Element, 64>(params)
                                                                        : backward_options_bytes<Element, 128>(params);
  });
  return bytes;
}

void backward_options(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    backward_head_dim(params.head_dim, params.head_dim_v) == 64
        ? run_backward_options<Element, 64>(params, workspace, stream)
        : run_backward_options<Element, 128>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
