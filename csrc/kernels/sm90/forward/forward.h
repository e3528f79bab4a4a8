// Attention forward on wgmma and TMA.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/scheduler/key_splits.h"
#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Scratch memory that forward() needs. None where each CTA has one tile of queries at most, or takes its tiles in
/// turn, work tiles are not split along the keys (split_kv.h), and no more is asked for than scaled products, softcap
/// and ALiBi.
int64_t forward_workspace_bytes(const ForwardParams& params, int64_t block_n, const KeySplits& splits);

/// out and lse of every row that a sequence covers. float16 and bfloat16; all options, a bias of 16 bits, any lengths.
/// Keys may lie in a cache, without options of scores, bias, masks and dropout; pages have a multiple of 8 rows and no
/// left padding. No stride of 0 in q, k and v; rows of out start at multiples of 16 bytes. block_n: keys of a
/// tile, as one of the shapes has it (shape.h). The workspace is null where none is needed.
void forward(const ForwardParams& params, int64_t block_n, const KeySplits& splits, void* workspace,
             cudaStream_t stream);

}  // namespace flash_ext::sm90
