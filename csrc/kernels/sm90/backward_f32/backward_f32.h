// Attention backward in float32 on wgmma.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_f32() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_f32_workspace_bytes(const BackwardParams& params);

/// Computes dq, dk and dv of every row that a sequence covers, and dsink. float32, in full precision. Requires head
/// dims up to 256, no bias, mask, dropout or `deterministic`, and rows of all tensors at multiples of 16 bytes. Serves
/// any lengths and strides.
void backward_f32(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
