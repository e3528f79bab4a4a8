// Which calls the backward of short sequences serves, for the plan too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kBackwardShortHeadDim = 64;
constexpr int kBackwardShortMostRows = 384;  // of Q and of K: a CTA has both, V and dO in shared memory

/// Blocks of 64 rows that Q and K of a call are filled up to.
constexpr int backward_short_blocks(int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = std::max<int64_t>({seqlen_q, seqlen_k, 1});
  return static_cast<int>((rows + kWarpgroupRows - 1) / kWarpgroupRows);
}

/// Warpgroups of a CTA, which share the blocks. An SM has registers for four of 128 a thread; three have enough of them
/// for tiles of 64 queries.
constexpr int backward_short_groups(int blocks) { return blocks <= 4 ? blocks : 3; }
constexpr int backward_short_block_m(int blocks) { return backward_short_groups(blocks) == 3 ? 64 : 32; }

}  // namespace flash_ext::sm90
