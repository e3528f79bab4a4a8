#include "../dropout_mask.cuh"
#include "../dropout_mask.h"

namespace flash_ext::sm80 {

void dropout_mask(const DropoutMaskParams& params, cudaStream_t stream) { run_dropout_mask(params, stream); }

}  // namespace flash_ext::sm80
