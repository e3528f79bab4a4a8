#include "kernels/sm80/forward/kernel.cuh"

namespace flash_ext::sm80 {

template void run_forward<__nv_bfloat16, 128>(const ForwardParams&, const ForwardMasks&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
