#include "kernels/sm90/backward_persistent/options_kernel.cuh"

namespace flash_ext::sm90 {

template void run_backward_persistent_options<__nv_bfloat16, 64>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
