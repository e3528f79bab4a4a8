#include "kernels/sm90/backward_options/backward_options.h"
#include "kernels/sm90/common/backward/dispatch.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_options_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward_options(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_options_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_backward_types<64, 128>(params, [&](auto element, auto head_dim) {
    bytes = backward_options_bytes<decltype(element), decltype(head_dim)::value>(params);
  });
  return bytes;
}

void backward_options(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_backward_types<64, 128>(params, [&](auto element, auto head_dim) {
    run_backward_options<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
