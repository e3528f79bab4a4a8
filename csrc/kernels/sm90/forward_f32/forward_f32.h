// Attention forward in float32 on wgmma.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that forward_f32() needs: none where each CTA has one tile of queries at most.
int64_t forward_f32_workspace_bytes(const ForwardParams& params);

/// Computes out and lse of every row that a sequence covers. float32, in full precision. Requires no bias, mask or
/// dropout, and rows of q, k and v at multiples of 16 bytes. Serves any lengths and strides. The workspace is null
/// where none is needed.
void forward_f32(const ForwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
