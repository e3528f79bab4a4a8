// attention_weights and its backward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Writes the weights. Takes float16, bfloat16, float32; rows of q and k start at multiples of 16 bytes. For packed
/// sequences, tiles beyond a sequence's lengths are not written.
void weights(const WeightsParams& params, cudaStream_t stream);

/// Computes dq, dk and dlse of every row that a sequence covers, given grad_weights. bias_gradient computes dbias.
void weights_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
