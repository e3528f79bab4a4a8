// Attention backward of short sequences on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_short() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_short_workspace_bytes(const BackwardParams& params);

/// dq, dk and dv of every row that a sequence covers, and dsink; the same bits in every run. float16 and bfloat16,
/// head_dim = head_dim_v up to kBackwardShortHeadDim, as many heads of k and v as of q, not packed, at most
/// kBackwardShortMostRows queries and keys, windows and sinks, no other options; grad_out is there; no stride of 0;
/// rows of all tensors start at multiples of 16 bytes.
void backward_short(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
