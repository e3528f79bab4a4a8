#include "kernels/sm80/common/dispatch.h"
#include "kernels/sm80/forward/forward.h"
#include "kernels/sm80/forward/visibility.cuh"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
void run_forward(const ForwardParams& params, const MaskBits& mask, cudaStream_t stream);

int64_t forward_workspace_bytes(const ForwardParams& params) { return MaskSizes(params).bytes(); }

void forward(const ForwardParams& params, void* workspace, cudaStream_t stream) {
  const MaskBits mask = make_mask_bits(params, workspace, stream);
  with_kernel_types(params, [&](auto element, auto head_dim) {
    run_forward<decltype(element), decltype(head_dim)::value>(params, mask, stream);
  });
}

}  // namespace flash_ext::sm80
