// The gradient of an additive bias on mma.sync, for attention and for attention_weights.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Scratch memory that bias_gradient() needs, aligned to 256 bytes. It need not be zeroed.
int64_t bias_gradient_workspace_bytes(const BackwardParams& params);

/// Computes dbias, summed over the dimensions in which the bias is broadcast, always in the same order. float16,
/// bfloat16, float32. Requires rows of q, k, v, out and grad_out at multiples of 16 bytes.
void bias_gradient(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm80
