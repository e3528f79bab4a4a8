// Tiles of the forward of short sequences, for the plan too.
#pragma once

#include <cstdint>

#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kForwardShortHeadDim = 128;

/// The head dim of the kernel that serves head dims up to `head_dim`.
constexpr int forward_short_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : kForwardShortHeadDim; }

struct ForwardShortShape {
  int warpgroups;   // of a CTA, each with 64 queries
  int block_n;      // keys of a tile
  int stages;       // tiles of K, and of V, in shared memory
  int ctas_per_sm;  // some load while others compute; each thread can have at least 128 registers
};

/// The shapes of the kernel for head_dim: two up to 64, three above.
constexpr ForwardShortShape forward_short_shape(int head_dim, int index) {
  constexpr ForwardShortShape kOf64[] = {{1, 64, 1, 4}, {1, 128, 1, 4}};
  constexpr ForwardShortShape kOf128[] = {{1, 64, 2, 2}, {2, 64, 2, 2}, {1, 128, 1, 2}};
  return head_dim <= 64 ? kOf64[index] : kOf128[index];
}

/// Up to so many keys, which are one tile, tiles of 64 are faster. More keys take fewer steps in tiles of 128.
constexpr int64_t kMostKeysOfSmallTiles = 64;

/// Returns the shape for as many queries and keys as a sequence has. few_ctas: CTAs of 64 queries would all run at
/// once.
constexpr ForwardShortShape forward_short_shape_for(int head_dim, int64_t seqlen_q, int64_t seqlen_k, bool few_ctas) {
  const bool is_small = seqlen_k <= kMostKeysOfSmallTiles;
  if (head_dim <= 64) return forward_short_shape(head_dim, is_small ? 0 : 1);
  // Few CTAs are better spread over more SMs; many load keys once for 128 queries, by two warpgroups, whose registers
  // have no room for 128 keys.
  if (few_ctas) return forward_short_shape(head_dim, is_small ? 0 : 2);
  return forward_short_shape(head_dim, seqlen_q <= kWarpgroupRows ? 0 : 1);
}

}  // namespace flash_ext::sm90
