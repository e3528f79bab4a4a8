#include "kernels/sm80/bias_gradient/kernel.cuh"

namespace flash_ext::sm80 {

template void run_bias_gradient<float>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
