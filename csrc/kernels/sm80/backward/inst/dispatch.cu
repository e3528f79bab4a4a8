#include "kernels/sm80/backward/backward.h"
#include "kernels/sm80/common/dispatch.h"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_kernel_types(params, [&](auto element, auto head_dim) {
    bytes = backward_bytes<decltype(element), decltype(head_dim)::value>(params);
  });
  return bytes;
}

void backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_kernel_types(params, [&](auto element, auto head_dim) {
    run_backward<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm80
