// Tiles, stages and registers of the float32 forward, which the plan reads too. Q, K and V lie in shared memory as
// subtiles (sm90/common/float_parts.cuh). Subtiles of Q have 64 rows and 64 columns; subtiles of K and V have as many
// rows, and as many columns, as a tile has keys.
#pragma once

#include <cstdint>

#include "kernels/common/scheduler/heads_in_l2.h"

namespace flash_ext::sm90 {

struct ForwardF32Shape {
  int keys;                // of a tile
  int warpgroups;          // consumer warpgroups
  int stages;              // subtiles of the ring of K and V
  int registers;           // of a consumer thread
  int producer_registers;  // of a producer thread
};

/// The head dims that there are kernels for.
constexpr int forward_f32_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : larger <= 192 ? 192 : 256;
}

/// Beyond 128, out takes 96 or 128 registers of a thread, and Q 144 or 192 KB. The rest has room for 32 keys.
constexpr ForwardF32Shape forward_f32_shape(int head_dim) {
  switch (head_dim) {
    case 64:
      return {64, 3, 6, 136, 104};
    case 128:
      return {64, 2, 5, 200, 104};
    case 192:
      return {32, 2, 13, 208, 88};
    default:
      return {32, 2, 5, 216, 72};
  }
}

/// The number of heads, counted over all batch entries, that run side by side, so that their keys and values stay in
/// L2. head_group: query heads that share a key head.
constexpr int64_t forward_f32_section(int64_t heads, int64_t head_group, int64_t seqlen_k, int64_t head_dims) {
  return heads_in_l2(kBytesInL2, seqlen_k * head_dims * 4, head_group, heads);
}

}  // namespace flash_ext::sm90
