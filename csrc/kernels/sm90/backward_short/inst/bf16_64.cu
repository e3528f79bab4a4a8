#include "kernels/sm90/backward_short/kernel.cuh"

namespace flash_ext::sm90 {

template void run_backward_short<__nv_bfloat16, 64, 1>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__nv_bfloat16, 64, 2>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__nv_bfloat16, 64, 3>(const BackwardParams&, void*, cudaStream_t);
template void run_backward_short<__nv_bfloat16, 64, 4>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
