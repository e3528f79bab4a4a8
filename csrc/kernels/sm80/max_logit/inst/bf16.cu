#include "kernels/sm80/max_logit/kernel.cuh"

namespace flash_ext::sm80 {

template void run_max_logit<__nv_bfloat16>(const ForwardParams&, cudaStream_t);

}  // namespace flash_ext::sm80
