// Rows of results that no sequence covers: out 0, lse -inf, gradients 0. The other kernels write every row below a
// sequence's used length.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Clears out and lse. Launches nothing where every row is covered: dense batches without seqused.
void clear_forward(const ForwardParams& params, cudaStream_t stream);

/// Zeroes dq and dlse of rows of q, dk and dv of rows of k, as far as they are asked for.
void clear_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
