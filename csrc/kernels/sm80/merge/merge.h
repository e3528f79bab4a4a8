// Merging of partial attention results, and its gradient.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// float16, bfloat16 and float32.
void merge(const MergeParams& params, cudaStream_t stream);
void merge_backward(const MergeBackwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
