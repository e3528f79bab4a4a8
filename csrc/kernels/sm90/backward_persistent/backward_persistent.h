// Attention backward on wgmma and TMA, in persistent CTAs.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that backward_persistent() needs, aligned to 256 bytes. It need not be zeroed.
int64_t backward_persistent_workspace_bytes(const BackwardParams& params);

/// Like backward() (sm90/backward/backward.h), for head dims up to 64 and any lengths, windows and sinks:
/// `deterministic` or not, without options; or, not `deterministic`, with one of kPersistentOptions
/// (sm90/common/backward/variant.h) or with a block mask alone, where lists_blocks() (sm90/common/backward/shape.h).
void backward_persistent(const BackwardParams& params, void* workspace, cudaStream_t stream);

}  // namespace flash_ext::sm90
