#include "kernels/sm80/common/element.h"
#include "kernels/sm80/max_logit/max_logit.h"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
template <class Element>
void run_max_logit(const ForwardParams& params, cudaStream_t stream);

void max_logit(const ForwardParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_max_logit<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
