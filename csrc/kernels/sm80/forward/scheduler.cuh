// The order of the forward's work tiles, and what the host decides about a call before it launches a kernel.
#pragma once

#include "head_order.h"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/common/score/bias_view.h"
#include "kernels/common/score/scale.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/launch.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

/// Finds the work tile of this CTA. The grid is (heads of a group x batch entries that share a bias, query tiles,
/// groups of both). CTAs with the most keys start first, which balances a causal mask. No more heads run at a time than
/// have their keys in L2, and CTAs that read the same bias run side by side. With a list, the grid has as many CTAs as
/// the list may have work tiles.
template <class Config>
__device__ __forceinline__ TileIndex tile_of_cta(const ForwardParams& p, const ForwardConstants& constants) {
  if (constants.list) return constants.list.locate(static_cast<int>(blockIdx.x));
  int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.x);
  int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);
  if (Config::kBiases && constants.batches > 1) {
    const int group = batch / constants.batch_groups;
    batch = batch % constants.batch_groups * constants.batches + head % constants.batches;
    head = group * constants.heads + head / constants.batches;
    if (head >= static_cast<int>(p.heads_q) || batch >= static_cast<int>(p.batch)) tile = kNoTile;
  } else if (constants.groups > 1) {
    head += batch % constants.groups * constants.heads;
    batch /= constants.groups;
    if (head >= static_cast<int>(p.heads_q)) tile = kNoTile;
  }
  return {batch, head, tile};
}

/// Returns constants with the order of tiles alone.
inline ForwardConstants schedule_heads(const ForwardParams& p, int64_t element_bytes) {
  const HeadSections sections =
      head_sections({p.batch, p.heads_q, p.heads_kv, p.seqlen_k * (p.head_dim + p.head_dim_v) * element_bytes,
                     bias_of_all_batches(p.bias)});
  ForwardConstants constants{};
  constants.heads = static_cast<int>(sections.heads);
  constants.groups = static_cast<int>(sections.head_sections);
  constants.batches = static_cast<int>(sections.batches);
  constants.batch_groups = static_cast<int>(sections.batch_sections);
  return constants;
}

/// Shared memory for the bias tiles of a CTA's warps.
template <class Config>
int64_t bias_bytes(const AttentionParams& p) {
  return Config::kWarps * BiasTile<Config::kWarpRows, Config::kBlockN>::bytes(p.bias);
}

/// Fills in the options. Returns the shared memory that the kernel needs in all.
template <class Config>
int64_t plan_options(ForwardConstants& constants, const ForwardParams& p) {
  using Unit = ScoreUnit<typename Config::Element>;
  int64_t shared_bytes = Config::kSharedBytes;
  const ScoreFactors factors(p, Unit::kPerNatural);
  constants.scale = constants.first_scale = factors.scale;
  if constexpr (Config::kReads) {
    constants.masked = p.blocks.offsets != nullptr || MaskSizes(p).units() > 0;
  }
  if constexpr (Config::kBiases) {
    const int64_t with_bias = shared_bytes + bias_bytes<Config>(p);
    constants.stages_bias = can_stage_bias(p.bias) && has_room_for_bias(Config::kShape, static_cast<int>(shared_bytes),
                                                                        p.bias.dtype, shared_bytes_per_cta());
    constants.reads_bias = p.bias.data && !constants.stages_bias;
    constants.bias_offset = static_cast<int>(shared_bytes);
    if (constants.stages_bias) shared_bytes = with_bias;
  }
  if constexpr (Config::kOneBias) constants.per_unit = 1.0f / constants.scale;
  if constexpr (Config::kOneDropout) shared_bytes += 2 * Config::kRandomBytes;
  if constexpr (Config::kOptionBranches) {
    constants.adds_alibi = p.alibi_slopes != nullptr;
    constants.drops = p.dropout.rule.threshold > 0;
    constants.caps = p.softcap > 0.0;
    constants.cap = factors.cap;
    const float last = constants.caps ? constants.cap : constants.first_scale;
    const bool rounds = Unit::kNatural && (constants.stages_bias || constants.adds_alibi);
    constants.scales_first = rounds || constants.reads_bias || !is_normal_scale(last);
    constants.scale = constants.scales_first ? 1.0f : last;
    constants.per_unit = 1.0f / constants.scale;
  }
  constants.most_bias = most_bias(Unit::kPerNatural * constants.per_unit);
  return shared_bytes;
}

inline ForwardVariant variant_of(const AttentionParams& p) {
  return variant_of({p.softmax_scale, p.softcap, p.alibi_slopes != nullptr, p.dropout.rule.threshold > 0,
                     p.mask.data != nullptr, p.blocks.offsets != nullptr, grid_asked(p),
                     p.seq.cu_seqlens_q || p.seq.cu_seqlens_k, p.seq.block_table != nullptr, p.bias.data != nullptr,
                     can_stage_bias(p.bias), p.dtype, p.bias.dtype});
}

}  // namespace flash_ext::sm80
