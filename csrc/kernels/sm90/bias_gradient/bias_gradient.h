// The gradient of an additive bias of attention on wgmma.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that bias_gradient() needs, aligned to 256 bytes. It need not be zeroed.
int64_t bias_gradient_workspace_bytes(const BackwardParams& params);

/// dbias, summed over the dimensions in which bias is broadcast, always in the same order. float16 and bfloat16; no
/// masks and no dropout; a gradient of out, and no stride of 0 in it nor in q, k and v; a bias whose rows can be copied
/// in pieces of 16 bytes.
void bias_gradient(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
