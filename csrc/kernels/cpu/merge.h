// Merging partial results over disjoint keys: lse = log sum_s exp(lse_s), out = sum_s exp(lse_s - lse) out_s.
#pragma once

#include "attention.h"

namespace flash_ext::cpu {

/// A part with lse -inf saw no key: it contributes nothing, whatever its out holds.
void merge(const MergeParams& params, ParallelFor parallel_for);

/// With share_s = exp(lse_s - lse):  d out_s = share_s d out,  d lse_s = share_s (<d out, out_s - out> + d lse).
void merge_backward(const MergeBackwardParams& params, ParallelFor parallel_for);

}  // namespace flash_ext::cpu
