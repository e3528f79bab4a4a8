// Tiles and registers of the backward, in one table that the plan reads too.
#pragma once

#include <cstdint>

#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kBackwardBlockM = 64;     // queries of a tile, except in the persistent kernel
constexpr int kMaxNarrowHeadDim = 128;  // the largest at which a warpgroup has both dK and dV of its keys

struct BackwardShape {
  int key_groups;    // of kWarpgroupRows keys, of a tile: one for each consumer warpgroup, or each CTA of a cluster
  int registers;     // of a thread of a warpgroup that computes scores
  int dq_registers;  // of the warpgroup that computes dQ and loads
  int block_m = kBackwardBlockM;
};

/// The head dim of the kernel that serves q and k of head_dim, v of head_dim_v: rows are filled up by zeros in shared
/// memory.
constexpr int backward_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : widest <= 192 ? 192 : 256;
}

constexpr BackwardShape backward_shape(int head_dim) {
  // dK and dV are 128 registers of a thread at head_dim 128, 64 at 64. Above that a warpgroup has one of them, and the
  // two key groups are those of the two CTAs of a cluster.
  if (head_dim > kMaxNarrowHeadDim) return {2, 208, 96};
  return head_dim == 64 ? BackwardShape{3, 144, 80} : BackwardShape{2, 216, 72};
}

/// The shape of the variant of block masks at head_dim 128. The persistent kernel's tiles have as many keys. Each of
/// their key groups lies within one column of blocks; the two groups may lie in different ones.
constexpr BackwardShape backward_blocks_shape() { return {2, 216, 72}; }

/// The shape of the persistent kernel, at head_dim 64. dK and dV are small there, and leave registers for scores and
/// gradients of 96 queries.
constexpr BackwardShape backward_persistent_shape() { return {2, 208, 88, 96}; }

/// The largest head_dim of the persistent kernel. It serves calls without options, with one of kPersistentOptions, or
/// with a block mask alone.
constexpr int kMostPersistentHeadDim = 64;

/// What decides whether the variant of block masks serves a call.
struct BackwardBlocksCall {
  int64_t block_m, block_n;  // 0: no block mask
  bool only_blocks;          // no bias, other mask, dropout, softcap, ALiBi, window; not deterministic
  bool equal_lengths;        // the host knows them all
  int64_t head_dim;
};

constexpr bool lists_blocks(const BackwardBlocksCall& call) {
  return call.block_m > 0 && call.only_blocks && call.equal_lengths && call.head_dim <= kMaxNarrowHeadDim &&
         call.block_m % kBackwardBlockM == 0 && call.block_n % kWarpgroupRows == 0;
}

/// Whether products of a step overlap those of the next in kernels of this shape. At head_dim 64 they do so in the
/// persistent kernel alone, which has other tiles (backward_persistent_shape).
constexpr bool is_pipelined(int head_dim) { return head_dim == 128; }

}  // namespace flash_ext::sm90
