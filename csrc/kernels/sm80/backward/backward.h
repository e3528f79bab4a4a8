// Attention backward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Scratch memory that backward() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_workspace_bytes(const BackwardParams& params);

/// Computes dq, dk and dv of every row that a sequence covers, and dsink; not dbias. Requires float16, bfloat16 or
/// float32, and rows of all tensors at multiples of 16 bytes.
void backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm80
