#include "../backward.cuh"
#include "../products_tf32.cuh"

namespace flash_ext::sm80 {

template int64_t backward_bytes<float, 64>(const BackwardParams&);
template void run_backward<float, 64>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
