// Lengths of the sequences of a call, as far as the host knows them.
#pragma once

#include "kernels/params.h"

namespace flash_ext {

/// Whether every sequence has the lengths of the tensors, so that the host knows them.
inline bool has_equal_lengths(const AttentionParams& p) {
  return !p.seq.cu_seqlens_q && !p.seq.cu_seqlens_k && !p.seq.seqused_q && !p.seq.seqused_k && !p.seq.leftpad_k;
}

}  // namespace flash_ext
