// The gradient of an additive bias of attention on wgmma.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Whether bias_gradient() can do it: attention without masks and dropout, in float16 or bfloat16, on a GPU of compute
/// capability 9.0, with a bias whose rows can be copied in pieces of 16 bytes.
bool serves_bias_gradient(const BackwardParams& params);

/// Scratch memory that bias_gradient() needs, aligned to 256 bytes. It need not be cleared.
int64_t bias_gradient_workspace_bytes(const BackwardParams& params);

/// dbias, summed over the dimensions in which bias is broadcast, always in the same order.
void bias_gradient(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
