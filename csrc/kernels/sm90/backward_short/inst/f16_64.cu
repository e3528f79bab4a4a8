#include "kernels/sm90/backward_short/kernel.cuh"

namespace flash_ext::sm90 {

template void run_backward_short<__half, 64, 1>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__half, 64, 2>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__half, 64, 3>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__half, 64, 4>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
