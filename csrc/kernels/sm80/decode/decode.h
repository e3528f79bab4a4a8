// Attention over a key-value cache, split along the keys.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Device memory that decode() needs for partial results, uninitialised; 0 where nothing is split.
int64_t decode_workspace_bytes(const ForwardParams& params);

/// Computes out and lse of every row. Takes float16, bfloat16, float32; rows of q, k, v and out start at multiples of
/// 16 bytes. after_append: the stream's last kernel is append(), which this one's start may overlap.
void decode(const ForwardParams& params, void* workspace, cudaStream_t stream, bool after_append = false);

}  // namespace flash_ext::sm80
