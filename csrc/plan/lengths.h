// Sequence lengths as the plan sees them; the host does not know the lengths of packed sequences.
#pragma once

#include <algorithm>

#include "problem.h"

namespace flash_ext::plan {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool has_empty_tensors(const Problem& p) { return p.batch == 0 || p.seqlen_q == 0 || p.seqlen_k == 0; }

/// The length by which the plan decides on CUDA: the length of all sequences or, if they are packed, the mean. The host
/// knows no more, and the bound on the longest must not change which kernels run.
inline int64_t typical_length(const Problem& p, int64_t length, int64_t total) {
  return total > 0 && p.device == Device::kCuda ? ceil_div(total, std::max<int64_t>(1, p.batch)) : length;
}
inline int64_t typical_queries(const Problem& p) { return typical_length(p, p.seqlen_q, p.total_q); }
inline int64_t typical_keys(const Problem& p) { return typical_length(p, p.seqlen_k, p.total_k); }

/// The number of query tiles of all heads, `group` of which share a tile.
inline int64_t query_tiles(const Problem& p, int64_t group, int64_t block_m) {
  return p.batch * (p.heads_q / group) * ceil_div(typical_queries(p) * group, block_m);
}

}  // namespace flash_ext::plan
