#include "kernels/sm80/bias_gradient/bias_gradient.h"
#include "kernels/sm80/bias_gradient/kernel.cuh"
#include "kernels/sm80/common/element.h"

namespace flash_ext::sm80 {

// Instantiated in the files beside this one.
extern template void run_bias_gradient<__half>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__nv_bfloat16>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<float>(const BackwardParams&, void*, cudaStream_t);

int64_t bias_gradient_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_element(params.dtype, [&](auto element) {
    bytes = BiasWorkspace(params, BiasTiles::of<decltype(element)>(params), nullptr).bytes;
  });
  return bytes;
}

void bias_gradient(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_bias_gradient<decltype(element)>(params, workspace, stream); });
}

}  // namespace flash_ext::sm80
