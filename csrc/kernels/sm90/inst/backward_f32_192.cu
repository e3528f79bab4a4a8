#include "../backward_f32.cuh"

namespace flash_ext::sm90 {

template void run_backward_f32<192>(const BackwardParams&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
