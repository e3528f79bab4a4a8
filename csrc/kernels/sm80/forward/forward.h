// Attention forward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Device memory that forward() needs for the bits of a mask, uninitialised; 0 without one.
int64_t forward_workspace_bytes(const ForwardParams& params);

/// Computes out and lse of every row that a sequence covers. Takes float16, bfloat16, float32; rows of q, k, v and out
/// start at multiples of 16 bytes.
void forward(const ForwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm80
