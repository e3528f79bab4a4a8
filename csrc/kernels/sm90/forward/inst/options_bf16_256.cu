#include "kernels/sm90/forward/options_kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_options<__nv_bfloat16, 256>(const ForwardParams&, const ForwardVisibility&, void*,
                                                      cudaStream_t);

}  // namespace flash_ext::sm90
