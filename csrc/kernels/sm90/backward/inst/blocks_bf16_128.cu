#include "kernels/sm90/backward/blocks_kernel.cuh"

namespace flash_ext::sm90 {

template void run_backward_blocks<__nv_bfloat16, 128>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
