#include "../weights.cuh"
#include "../weights_backward.cuh"

namespace flash_ext::sm80 {

template void run_weights<float>(const WeightsParams&, cudaStream_t);
template void run_weights_backward<float>(const BackwardParams&, cudaStream_t);

}  // namespace flash_ext::sm80
