// What the kernels of this folder are instantiated for.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flash_ext::sm80 {

/// Shared memory that a block can have on every GPU since Ampere: 99 KB on those of the RTX line.
constexpr int kSmallestSharedBytes = 99 * 1024;

/// The head dim of the kernel that serves q, k of head_dim and v of head_dim_v: rows are filled up by zeros in shared
/// memory, never in the tensors.
inline int kernel_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t larger = std::max(head_dim, head_dim_v);
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}

}  // namespace flash_ext::sm80
