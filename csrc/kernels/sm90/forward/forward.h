// Attention forward on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/scheduler/key_splits.h"
#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Bytes of scratch memory that forward() needs. A call without bias, masks, dropout, splits (launch_plan.h) or a list
/// of work tiles needs none if each CTA has one query tile at most, or takes its tiles in turn.
int64_t forward_workspace_bytes(const ForwardParams& params, int64_t block_n, const KeySplits& splits);

/// Computes out and lse of every row that a sequence covers. Serves float16 and bfloat16, all options, a bias of 16
/// bits and any lengths. Keys may lie in a cache if the call has no score options, bias, masks or dropout; pages have
/// a multiple of 8 rows and no left padding. Requires that q, k and v have no stride of 0 and that rows of out start at
/// multiples of 16 bytes. block_n: keys of a tile, as one of the shapes has it (shape.h). The workspace is null where
/// none is needed.
void forward(const ForwardParams& params, int64_t block_n, const KeySplits& splits, void* workspace,
             cudaStream_t stream);

}  // namespace flash_ext::sm90
