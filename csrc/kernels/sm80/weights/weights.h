// attention_weights and its backward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// float16, bfloat16, float32; rows of q and k start at multiples of 16 bytes. Of packed sequences only what they reach
/// is written.
void weights(const WeightsParams& params, cudaStream_t stream);

/// dq, dk and dlse of every row that a sequence covers, given grad_weights. dbias is bias_gradient's matter.
void weights_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
