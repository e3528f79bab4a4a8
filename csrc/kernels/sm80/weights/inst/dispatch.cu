#include "kernels/sm80/common/element.h"
#include "kernels/sm80/weights/weights.h"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
template <class Element>
void run_weights(const WeightsParams& params, cudaStream_t stream);
template <class Element>
void run_weights_backward(const BackwardParams& params, cudaStream_t stream);

void weights(const WeightsParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_weights<decltype(element)>(params, stream); });
}

void weights_backward(const BackwardParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_weights_backward<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
