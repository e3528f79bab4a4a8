#include <algorithm>

#include "kernels/sm90/common/element.h"
#include "kernels/sm90/forward_short/forward_short.h"
#include "kernels/sm90/forward_short/shape.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
void run_forward_short(const ForwardParams& params, int64_t block_n, cudaStream_t stream);

void forward_short(const ForwardParams& params, int64_t block_n, cudaStream_t stream) {
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    if (forward_short_head_dim(std::max(params.head_dim, params.head_dim_v)) == 64)
      return run_forward_short<Element, 64>(params, block_n, stream);
    run_forward_short<Element, kForwardShortHeadDim>(params, block_n, stream);
  });
}

}  // namespace flash_ext::sm90
