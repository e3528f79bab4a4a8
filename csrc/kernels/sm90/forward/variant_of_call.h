// Chooses the variant of the forward that serves a call (shape.h), and the order of query tiles in the variant for
// block masks.
#pragma once

#include "kernels/common/lengths.h"
#include "kernels/common/scheduler/longest_first.h"
#include "shape.h"

namespace flash_ext::sm90 {

inline VariantOptions variant_options(const AttentionParams& p) {
  return {p.dropout.rule.threshold > 0, p.bias.data != nullptr, p.bias.dtype == p.dtype,
          p.mask.data || p.blocks.offsets, scales_first(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale)};
}

inline ForwardBlocksCall blocks_call(const AttentionParams& p) {
  const bool other_options = p.bias.data || p.mask.data || p.dropout.rule.threshold > 0 ||
                             scales_first(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale);
  return {p.blocks.offsets ? p.blocks.block_m : 0,
          p.blocks.block_n,
          !other_options && p.window.left < 0 && p.window.right < 0,
          has_equal_lengths(p),
          p.head_dim,
          p.head_dim_v};
}

inline LongestFirst forward_blocks_order(const AttentionParams& p, int64_t block_m) {
  const TileCosts costs = {p.blocks.offsets,
                           true,
                           p.blocks.offsets_batch_stride,
                           p.blocks.offsets_head_stride,
                           static_cast<int32_t>(p.blocks.block_m / block_m),
                           1};
  // A query head's share of K and V of its key head.
  const int64_t key_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * 2 * p.heads_kv / p.heads_q;
  return {costs,
          p.batch,
          p.heads_q,
          (p.seqlen_q + block_m - 1) / block_m,
          (p.seqlen_k + p.blocks.block_n - 1) / p.blocks.block_n,
          key_bytes};
}

}  // namespace flash_ext::sm90
