#include "kernels/sm80/common/element.h"
#include "kernels/sm80/decode/append.cuh"
#include "kernels/sm80/decode/append.h"

namespace flash_ext::sm80 {

void append(const AppendParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_append<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
