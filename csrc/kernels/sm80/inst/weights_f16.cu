#include "../weights.cuh"
#include "../weights_backward.cuh"

namespace flash_ext::sm80 {

template void run_weights<__half>(const WeightsParams&, cudaStream_t);
template void run_weights_backward<__half>(const BackwardParams&, cudaStream_t);

}  // namespace flash_ext::sm80
