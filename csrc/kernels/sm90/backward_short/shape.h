// Which calls the backward of short sequences serves, for the plan too.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kBackwardShortHeadDim = 128;

/// The head dim of the kernel that serves head_dim.
constexpr int backward_short_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : kBackwardShortHeadDim; }

/// The most rows of Q and of K: a CTA has all of Q, K, V and dO in shared memory.
constexpr int backward_short_most_rows(int64_t head_dim) { return head_dim <= 64 ? 256 : 128; }

/// Warpgroups of a CTA, each with 64 keys and 64 queries.
constexpr int backward_short_warpgroups(int64_t seqlen_q, int64_t seqlen_k) {
  const int64_t rows = std::max<int64_t>({seqlen_q, seqlen_k, 1});
  return static_cast<int>((rows + kWarpgroupRows - 1) / kWarpgroupRows);
}

}  // namespace flash_ext::sm90
