// Attention backward of short sequences on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_short() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_short_workspace_bytes(const BackwardParams& params);

/// Computes dq, dk and dv of every row that a sequence covers, and dsink, with the same bits in every run. Requires
/// float16 or bfloat16, head_dim = head_dim_v up to kBackwardShortHeadDim, as many heads of k and v as of q, no packed
/// sequences, at most backward_short_most_rows() queries and keys, no options but windows and sinks, grad_out, no
/// stride of 0, and rows of all tensors at multiples of 16 bytes.
void backward_short(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
