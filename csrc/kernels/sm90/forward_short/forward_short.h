// Attention forward of short sequences on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Computes out and lse, in tiles of params.block_m queries and block_n keys, as one of the shapes has them (shape.h).
/// Requires float16 or bfloat16, head dims up to kForwardShortHeadDim, lengths that the host knows, no options, a
/// positive scale, no stride of 0, and rows of all tensors at multiples of 16 bytes. Needs no scratch memory.
void forward_short(const ForwardParams& params, int64_t block_n, cudaStream_t stream);

}  // namespace flash_ext::sm90
