// Which CTA of the forward computes which tile, and what the host decides about a call before it launches a kernel.
#pragma once

#include "head_order.h"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/common/score/bias_view.h"
#include "kernels/common/score/scale.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/launch.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

/// A grid of (heads of a group x batch entries that share a bias, CTAs of queries, groups of both), scheduled in this
/// order: the CTAs with the most keys first, which balances a causal mask, of no more heads than whose keys stay in
/// L2, and what reads the same bias side by side. Or a list, and a grid of as many CTAs as it may have work tiles.
template <class Config>
__device__ __forceinline__ TileIndex tile_of_cta(const ForwardParams& p, const ForwardSchedule& schedule) {
  if (schedule.list) return schedule.list.locate(static_cast<int>(blockIdx.x));
  int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.x);
  int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  if (Config::kBiases && schedule.batches > 1) {
    const int group = batch / schedule.batch_groups;
    batch = batch % schedule.batch_groups * schedule.batches + head % schedule.batches;
    head = group * schedule.heads + head / schedule.batches;
    if (head >= static_cast<int>(p.heads_q) || batch >= static_cast<int>(p.batch)) tile = kNoTile;
  } else if (schedule.groups > 1) {
    head += batch % schedule.groups * schedule.heads;
    batch /= schedule.groups;
    if (head >= static_cast<int>(p.heads_q)) tile = kNoTile;
  }
  return {batch, head, tile};
}

inline ForwardSchedule schedule_heads(const ForwardParams& p, int64_t element_bytes) {
  const HeadSections sections =
      head_sections({p.batch, p.heads_q, p.heads_kv, p.seqlen_k * (p.head_dim + p.head_dim_v) * element_bytes,
                     bias_of_all_batches(p.bias)});
  ForwardSchedule schedule{};
  schedule.heads = static_cast<int>(sections.heads);
  schedule.groups = static_cast<int>(sections.head_sections);
  schedule.batches = static_cast<int>(sections.batches);
  schedule.batch_groups = static_cast<int>(sections.batch_sections);
  return schedule;
}

/// Shared memory for the bias tiles of a CTA's warps.
template <class Config>
int64_t bias_bytes(const AttentionParams& p) {
  return Config::kWarps * BiasTile<Config::kWarpRows, Config::kBlockN>::bytes(p.bias);
}

/// The options, and the shared memory that the kernel needs in all.
template <class Config>
int64_t plan_options(ForwardSchedule& schedule, const ForwardParams& p) {
  using Unit = ScoreUnit<typename Config::Element>;
  int64_t shared_bytes = Config::kSharedBytes;
  const ScoreFactors factors(p, Unit::kPerNatural);
  schedule.scale = schedule.first_scale = factors.scale;
  if constexpr (Config::kReads) {
    schedule.blocks_mask = p.blocks.offsets != nullptr;
    schedule.masked = schedule.blocks_mask || MaskSizes(p).units() > 0;
    schedule.words_offset = static_cast<int>(shared_bytes);
    if (schedule.blocks_mask) shared_bytes += 2 * Config::kVisibilityBytes;
  }
  if constexpr (Config::kBiases) {
    const int64_t with_bias = shared_bytes + bias_bytes<Config>(p);
    schedule.stages_bias = can_stage_bias(p.bias) && has_room_for_bias(Config::kShape, static_cast<int>(shared_bytes),
                                                                       p.bias.dtype, shared_bytes_per_cta());
    schedule.reads_bias = p.bias.data && !schedule.stages_bias;
    schedule.bias_offset = static_cast<int>(shared_bytes);
    if (schedule.stages_bias) shared_bytes = with_bias;
  }
  if constexpr (Config::kOneBias) schedule.per_unit = 1.0f / schedule.scale;
  if constexpr (Config::kOneDropout) shared_bytes += 2 * Config::kRandomBytes;
  if constexpr (Config::kOptionBranches) {
    schedule.adds_alibi = p.alibi_slopes != nullptr;
    schedule.drops = p.dropout.rule.threshold > 0;
    schedule.caps = p.softcap > 0.0;
    schedule.cap = factors.cap;
    const float last = schedule.caps ? schedule.cap : schedule.first_scale;
    const bool rounds = Unit::kNatural && (schedule.stages_bias || schedule.adds_alibi);
    schedule.scales_first = rounds || schedule.reads_bias || !is_normal_scale(last);
    schedule.scale = schedule.scales_first ? 1.0f : last;
    schedule.per_unit = 1.0f / schedule.scale;
  }
  schedule.most_bias = most_bias(Unit::kPerNatural * schedule.per_unit);
  return shared_bytes;
}

inline ForwardVariant variant_of(const AttentionParams& p) {
  return variant_of({p.softmax_scale, p.softcap, p.alibi_slopes != nullptr, p.dropout.rule.threshold > 0,
                     p.mask.data != nullptr, p.blocks.offsets != nullptr, p.seq.block_table != nullptr,
                     p.bias.data != nullptr, can_stage_bias(p.bias), p.dtype, p.bias.dtype});
}

}  // namespace flash_ext::sm80
