#include "kernels/sm90/forward/options_kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_options<__half, 256>(const ForwardParams&, const ForwardVisibility&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
