#include "kernels/sm90/backward/backward.h"
#include "kernels/sm90/backward/shape.h"
#include "kernels/sm90/common/dispatch.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

namespace {

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_backward_types(const BackwardParams& p, Run run) {
  with_element(p, [&](auto element) {
    switch (backward_head_dim(p.head_dim)) {
      case 64:
        return run(element, HeadDim<64>());
      case 128:
        return run(element, HeadDim<128>());
      case 192:
        return run(element, HeadDim<192>());
      default:
        return run(element, HeadDim<256>());
    }
  });
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_backward_types(params, [&](auto element, auto head_dim) {
    bytes = backward_bytes<decltype(element), decltype(head_dim)::value>(params);
  });
  return bytes;
}

void backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_backward_types(params, [&](auto element, auto head_dim) {
    run_backward<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
