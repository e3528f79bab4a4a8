#include "kernels/sm80/weights/backward_kernel.cuh"
#include "kernels/sm80/weights/kernel.cuh"

namespace flash_ext::sm80 {

template void run_weights<float>(const WeightsParams&, cudaStream_t);
template void run_weights_backward<float>(const BackwardParams&, cudaStream_t);

}  // namespace flash_ext::sm80
