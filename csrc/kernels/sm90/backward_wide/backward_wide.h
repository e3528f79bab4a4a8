// Attention backward on wgmma and TMA, for wide heads, by clusters of two CTAs.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_wide() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_wide_workspace_bytes(const BackwardParams& params);

/// Like backward() (sm90/backward/backward.h), for head dims from 129 to 256, and any lengths, windows and sinks, with
/// any options together; without options also `deterministic`.
void backward_wide(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
