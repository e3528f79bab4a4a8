#include "kernels/common/warp_products_tf32.cuh"
#include "kernels/sm80/backward/kernel.cuh"

namespace flash_ext::sm80 {

template int64_t backward_bytes<float, 128>(const BackwardParams&);
template void run_backward<float, 128>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
