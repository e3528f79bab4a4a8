#include "kernels/sm90/backward_options/kernel.cuh"

namespace flash_ext::sm90 {

template int64_t backward_options_bytes<__half, 128>(const BackwardParams&);
template void run_backward_options<__half, 128>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
