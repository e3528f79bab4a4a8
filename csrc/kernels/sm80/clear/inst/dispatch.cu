#include "kernels/sm80/clear/clear.h"
#include "kernels/sm80/clear/kernel.cuh"

namespace flash_ext::sm80 {

void clear_forward(const ForwardParams& params, cudaStream_t stream) { run_clear_forward(params, stream); }

void clear_backward(const BackwardParams& params, cudaStream_t stream) { run_clear_backward(params, stream); }

}  // namespace flash_ext::sm80
