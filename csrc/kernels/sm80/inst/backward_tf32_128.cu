#include "../backward.cuh"
#include "../products_tf32.cuh"

namespace flash_ext::sm80 {

template int64_t backward_bytes<Tf32, 128>(const BackwardParams&);
template void run_backward<Tf32, 128>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm80
