// Appending keys and values to a cache, with rotary embedding (Su et al., "RoFormer", 2021) of the keys and of q.
#pragma once

#include "attention.h"

namespace flash_ext::cpu {

/// Writes k and v after the cached rows, and writes q_rotated and seqused_k_after. Token t of k is rotated by the
/// position cached length + t, left padding included; q is rotated as rotate_q_by_position says.
void append_to_cache(const AppendParams& params, ParallelFor parallel_for);

}  // namespace flash_ext::cpu
