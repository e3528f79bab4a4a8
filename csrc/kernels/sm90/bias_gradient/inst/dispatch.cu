#include "kernels/sm90/bias_gradient/bias_gradient.h"
#include "kernels/sm90/bias_gradient/kernel.cuh"
#include "kernels/sm90/bias_gradient/shape.h"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
extern template void run_bias_gradient<__nv_bfloat16, 64>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__nv_bfloat16, 128>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__half, 64>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__half, 128>(const BackwardParams&, void*, cudaStream_t);

int64_t bias_gradient_workspace_bytes(const BackwardParams& p) {
  return BiasMemory(p, bias_tiles<__half>(p), nullptr).bytes;
}

void bias_gradient(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  with_types_of<64, kMaxBiasHeadDim>(p, kernel_head_dim(p.head_dim, p.head_dim_v), [&](auto element, auto head_dim) {
    run_bias_gradient<decltype(element), decltype(head_dim)::value>(p, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
