#include "kernels/sm90/bias_gradient/kernel.cuh"

namespace flash_ext::sm90 {

template void run_bias_gradient<__nv_bfloat16, 64>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
