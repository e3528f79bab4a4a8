#include "kernels/sm90/forward/blocks_kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_blocks<__half, 64>(const ForwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
