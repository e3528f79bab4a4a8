// The sum of two rows and its layer norm (Ba et al. 2016), in one pass over memory.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// float16, bfloat16 and float32.
void add_layer_norm(const AddLayerNormParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
