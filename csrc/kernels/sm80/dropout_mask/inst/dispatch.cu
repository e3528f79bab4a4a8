#include "kernels/sm80/dropout_mask/dropout_mask.h"
#include "kernels/sm80/dropout_mask/kernel.cuh"

namespace flash_ext::sm80 {

void dropout_mask(const DropoutMaskParams& params, cudaStream_t stream) { run_dropout_mask(params, stream); }

}  // namespace flash_ext::sm80
