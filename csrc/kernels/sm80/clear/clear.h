// Rows of results that no sequence covers: out 0, lse -inf, gradients 0. The other kernels write every row below a
// sequence's used length.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Nothing is launched where every row is covered: dense batches without seqused.
void clear_forward(const ForwardParams& params, cudaStream_t stream);

/// dq and dlse of rows of q, dk and dv of rows of k; those that are asked for.
void clear_backward(const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
