#include "kernels/sm90/forward/scores_kernel.cuh"

namespace flash_ext::sm90 {

template void run_forward<__half, 192>(const ForwardParams&, int64_t, const KeySplits&, void*, cudaStream_t);

}  // namespace flash_ext::sm90
