#include "kernels/sm80/add_layer_norm/add_layer_norm.h"
#include "kernels/sm80/add_layer_norm/kernel.cuh"
#include "kernels/sm80/common/element.h"

namespace flash_ext::sm80 {

void add_layer_norm(const AddLayerNormParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_add_layer_norm<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
