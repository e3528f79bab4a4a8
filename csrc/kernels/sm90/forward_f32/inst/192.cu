#include "kernels/sm90/forward_f32/kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward_f32<192>(const ForwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
