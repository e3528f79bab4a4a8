#include "kernels/sm90/backward_persistent/blocks_kernel.cuh"

namespace flash_ext::sm90 {

template int64_t backward_persistent_blocks_bytes<__half, 64>(const BackwardParams&);
template void run_backward_persistent_blocks<__half, 64>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
