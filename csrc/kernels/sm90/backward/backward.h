// Attention backward on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward() needs, aligned to 256 bytes. It need not be cleared.
int64_t backward_workspace_bytes(const BackwardParams& params);

/// dq, dk and dv of every row that a sequence covers, and dsink. float16 and bfloat16, head_dim = head_dim_v, windows,
/// sinks, any lengths, `deterministic` without other options, and up to kMaxNarrowHeadDim all options, beyond 64
/// without a bias of 32 bits or more beside masks or dropout; grad_out is there; no stride of 0; rows of all tensors
/// start at multiples of 16 bytes.
void backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
