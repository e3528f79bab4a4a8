#include "kernels/sm90/backward_wide/kernel.cuh"

namespace flash_ext::sm90 {

template int64_t backward_wide_bytes<__half, 256>(const BackwardParams&);
template void run_backward_wide<__half, 256>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
