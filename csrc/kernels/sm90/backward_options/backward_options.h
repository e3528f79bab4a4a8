// Attention backward on wgmma and TMA, with any options together.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_options() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_options_workspace_bytes(const BackwardParams& params);

/// Like backward() (sm90/backward/backward.h), for head dims up to 128 and any options together; beyond 64, no bias of
/// 32 bits or more together with masks or dropout. Requires some option, and not `deterministic`.
void backward_options(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
