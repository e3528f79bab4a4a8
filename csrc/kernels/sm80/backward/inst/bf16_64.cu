#include "kernels/sm80/backward/kernel.cuh"

namespace flash_ext::sm80 {

template int64_t backward_bytes<__nv_bfloat16, 64>(const BackwardParams&);
template void run_backward<__nv_bfloat16, 64>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
