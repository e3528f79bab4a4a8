#include "kernels/sm90/forward_short/kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_short<__nv_bfloat16, 128>(const ForwardParams&, int64_t, cudaStream_t);

}  // namespace flash_ext::sm90
