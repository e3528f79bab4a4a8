#include "kernels/sm90/forward/blocks_kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_blocks<__nv_bfloat16, 64>(const ForwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
