#include "kernels/sm90/backward_wide/options_kernel.cuh"

namespace flash_ext::sm90 {

template void launch_backward_wide_options<__half, 256>(const BackwardParams&, const BackwardArguments&, cudaStream_t);

}  // namespace flash_ext::sm90
