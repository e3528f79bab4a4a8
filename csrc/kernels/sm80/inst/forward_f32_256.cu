#include "../forward.cuh"
#include "../products_tf32.cuh"

namespace flash_ext::sm80 {

template void run_forward<float, 256>(const ForwardParams&, const MaskBits&, cudaStream_t);

}  // namespace flash_ext::sm80
