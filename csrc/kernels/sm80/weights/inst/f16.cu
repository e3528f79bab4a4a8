#include "kernels/sm80/weights/backward_kernel.cuh"
#include "kernels/sm80/weights/kernel.cuh"

namespace flash_ext::sm80 {

template void run_weights<__half>(const WeightsParams&, cudaStream_t);
template void run_weights_backward<__half>(const BackwardParams&, cudaStream_t);

}  // namespace flash_ext::sm80
