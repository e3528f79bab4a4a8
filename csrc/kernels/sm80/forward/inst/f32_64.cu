#include "kernels/common/warp_products_tf32.cuh"
#include "kernels/sm80/forward/kernel.cuh"

namespace flash_ext::sm80 {

template void run_forward<float, 64>(const ForwardParams&, const ForwardMasks&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
