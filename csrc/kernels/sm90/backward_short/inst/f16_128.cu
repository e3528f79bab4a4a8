#include "kernels/sm90/backward_short/kernel.cuh"

namespace flash_ext::sm90 {

template void run_backward_short<__half, 128, 1>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__half, 128, 2>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
