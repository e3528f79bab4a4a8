#include "../append.cuh"
#include "../append.h"
#include "../element.h"

namespace flash_ext::sm80 {

void append(const AppendParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_append<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
