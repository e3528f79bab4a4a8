// How many heads run side by side: as many as have keys and values that fit into L2 together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_ext {

/// How much of what several heads read should stay in L2, of the 50 MB of an H100 or H200. Smaller sections gain
/// nothing (docs/kernels/block_sparse.md, "Rejected designs").
constexpr int64_t kBytesInL2 = 32 << 20;

/// Heads of q, in whole groups that share a key head, one group at least. key_bytes: of a key head.
constexpr int64_t heads_in_l2(int64_t l2_bytes, int64_t key_bytes, int64_t head_group, int64_t heads) {
  const int64_t fitting = l2_bytes / std::max<int64_t>(1, key_bytes) * head_group;
  return std::clamp(fitting, std::min(head_group, heads), heads);
}

}  // namespace flash_ext
