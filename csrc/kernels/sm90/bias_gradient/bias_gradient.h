// The gradient of an additive bias of attention on wgmma.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that bias_gradient() needs, aligned to 256 bytes. It need not be zeroed.
int64_t bias_gradient_workspace_bytes(const BackwardParams& params);

/// Computes dbias, summed over the dimensions in which the bias is broadcast, always in the same order. Requires
/// float16 or bfloat16, grad_out, no masks, no dropout, no stride of 0 in grad_out, q, k and v, and a bias whose rows
/// can be copied 16 bytes at a time.
void bias_gradient(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
