// What the host knows of the work of a call: its shape, how many CTAs share it, and the memory of the tiles that
// split-KV divides (split_kv.cuh).
#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/common/lengths.h"
#include "kernels/common/scheduler/key_splits.h"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// The shape whose tiles have so many rows and keys.
constexpr ForwardShape forward_shape_with(const HeadDims& dims, int64_t block_m, int64_t block_n) {
  for (const ForwardTiles tiles : {ForwardTiles::kFewKeys, ForwardTiles::kFewQueries}) {
    const ForwardShape shape = forward_shape(dims, tiles);
    if (shape.warpgroups * kWarpgroupRows == block_m && shape.block_n == block_n) return shape;
  }
  return forward_shape(dims, ForwardTiles::kManyKeys);
}

/// Positions of the order in which CTAs take query tiles, or splits of them.
inline int64_t forward_positions(const AttentionParams& p, const ForwardShape& shape, const KeySplits& splits) {
  const int64_t block_m = shape.warpgroups * kWarpgroupRows;
  return (p.seqlen_q + block_m - 1) / block_m * p.batch * p.heads_q + splits.more_positions();
}

/// CTAs that the device holds.
inline int64_t ctas_at_a_time(const ForwardShape& shape) {
  return int64_t{shape.ctas_per_sm} * device_attribute(cudaDevAttrMultiProcessorCount);
}

/// Whether no CTA has more than one position, or each knows all of its own: then there is no counter. Tiles of few
/// queries cost little more than taking one.
inline bool needs_no_counter(const AttentionParams& p, const ForwardShape& shape, const KeySplits& splits) {
  const int64_t positions = forward_positions(p, shape, splits);
  const bool in_turn = shape.ctas_per_sm > 1 && has_equal_lengths(p) && positions < INT32_MAX;
  return in_turn || positions <= ctas_at_a_time(shape);
}

/// What a warp leaves of a split, in float4s: its rows of out, their stabilisers and sums, and whether V
/// held Inf or NaN that some of them do not see. Those of a lane are 32 apart.
constexpr int split_float4s_of_warp(const HeadDims& dims) { return (dims.v / 8 + 1) * 32 + 2; }

/// The workspace holds the counter of the schedule, and the partial results.
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
