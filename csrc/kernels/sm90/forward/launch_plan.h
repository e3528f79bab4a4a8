// What the host computes for a call: the shape of its tiles, whether CTAs need a counter, and the memory of the tiles
// that split-KV divides (split_kv.cuh).
#pragma once

#include <cstdint>

#include "kernels/common/lengths.h"
#include "kernels/common/scheduler/key_splits.h"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Returns the shape whose tiles have block_m queries and block_n keys.
constexpr ForwardShape forward_shape_with(const HeadDims& dims, int64_t block_m, int64_t block_n) {
  for (const ForwardTiles tiles : {ForwardTiles::kFewKeys, ForwardTiles::kFewQueries, ForwardTiles::kFewTiles}) {
    const ForwardShape shape = forward_shape(dims, tiles);
    if (shape.warpgroups * kWarpgroupRows == block_m && shape.block_n == block_n) return shape;
  }
  return forward_shape(dims, ForwardTiles::kManyKeys);
}

/// The number of positions in the order in which CTAs take query tiles and splits.
inline int64_t forward_positions(const AttentionParams& p, const ForwardShape& shape, const KeySplits& splits) {
  const int64_t block_m = shape.warpgroups * kWarpgroupRows;
  return (p.seqlen_q + block_m - 1) / block_m * p.batch * p.heads_q + splits.more_positions();
}

/// The number of CTAs that the device holds at a time.
inline int64_t ctas_at_a_time(const ForwardShape& shape) {
  return int64_t{shape.ctas_per_sm} * device_attribute(cudaDevAttrMultiProcessorCount);
}

/// Whether CTAs need no counter: each has one position at most, or takes positions in turn and so knows all of its own.
/// They take tiles for few queries in turn, because such a tile costs little more than taking one from a counter.
inline bool needs_no_counter(const AttentionParams& p, const ForwardShape& shape, const KeySplits& splits) {
  const int64_t positions = forward_positions(p, shape, splits);
  const bool in_turn = shape.ctas_per_sm > 1 && has_equal_lengths(p) && positions < INT32_MAX;
  return in_turn || positions <= ctas_at_a_time(shape);
}

/// The float4s that a warp stores of a split: its rows of out, their stabilisers and sums, and whether V held Inf or
/// NaN that some of these rows do not see. The float4s of a lane are 32 apart.
constexpr int split_float4s_of_warp(const HeadDims& dims) { return (dims.v / 8 + 1) * 32 + 2; }

/// Bytes of the workspace before the partial results. The counter of the schedule lies there.
constexpr int64_t kPartialsOffset = 128;

inline int64_t split_kv_workspace_bytes(const AttentionParams& p, const ForwardShape& shape, const HeadDims& dims,
                                        const KeySplits& splits) {
  constexpr int64_t kFloat4Bytes = 16;
  const int64_t partial_bytes =
      int64_t{shape.warpgroups} * kWarpgroupWarps * split_float4s_of_warp(dims) * kFloat4Bytes;
  if (splits.tiles > 0) return kPartialsOffset + int64_t{splits.tiles} * splits.per_tile() * partial_bytes;
  return needs_no_counter(p, shape, splits) ? 0 : sizeof(unsigned long long);
}

}  // namespace flash_ext::sm90
