// Attention backward on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_workspace_bytes(const BackwardParams& params);

/// Computes dq, dk and dv of every row that a sequence covers, and dsink. Requires float16 or bfloat16,
/// grad_out, no stride of 0, and rows of all tensors at multiples of 16 bytes. Serves any lengths, windows
/// and sinks; the options, and how they may go together, follow from pipelines() and lists_blocks()
/// (sm90/common/backward/variant.h, shape.h). It serves `deterministic` without masks of query-key pairs and without
/// block masks.
void backward(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
