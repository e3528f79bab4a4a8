// Tiles and variants of the forward for Hopper.
#include <iterator>

#include "features.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/scheduler/heads_in_l2.h"
#include "kernels/common/scheduler/work_order.h"
#include "kernels/sm90/common/score_options.h"
#include "kernels/sm90/forward/shape.h"
#include "kernels/sm90/forward/tile_order.h"
#include "kernels/sm90/forward_f32/shape.h"
#include "kernels/sm90/forward_short/shape.h"
#include "key_splits.h"
#include "lengths.h"
#include "masked_tiles.h"
#include "operations.h"
#include "sm90_tiles.h"

namespace flash_ext::plan {
namespace {

/// The number of keys in the tiles that a warpgroup visits, averaged over some warpgroups, for sequences of typical
/// length.
double keys_visited(const Problem& p, int64_t block_n) {
  constexpr int64_t kRows = sm90::kWarpgroupRows, kMostGroups = 8;
  const int64_t queries = typical_queries(p), keys = typical_keys(p);
  const Window window = make_window(p.window_left, p.window_right, p.top_left, queries, keys);
  const int64_t groups = ceil_div(queries, kRows), step = ceil_div(groups, kMostGroups);
  int64_t tiles = 0, looked_at = 0;
  for (int64_t group = 0; group < groups; group += step, ++looked_at) {
    const int64_t first = group * kRows, end = std::min(first + kRows, queries);
    const TileRange range = tile_range(first, end, keys, window, block_n);
    tiles += range.end - range.begin;
  }
  return static_cast<double>(tiles * block_n) / static_cast<double>(looked_at);
}

bool has_score_options(const Problem& p) { return sm90::has_score_options(p.softcap, p.has_alibi, p.softmax_scale); }

/// Whether a call runs tiles for few queries, because tiles of many would leave too many warpgroups without rows.
/// Measured on H200.
bool fills_few_query_tiles(const Problem& p, const sm90::HeadDims& dims, const sm90::ForwardShape& many) {
  constexpr double kFewerRows = 0.8;
  if (p.wants_max_logit || !sm90::has_tiles(dims, sm90::ForwardTiles::kFewQueries)) return false;
  const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewQueries);
  const int64_t queries = typical_queries(p), keys = typical_keys(p);
  const auto rows_of = [&](const sm90::ForwardShape& shape) {
    const int64_t block_m = shape.warpgroups * sm90::kWarpgroupRows;
    return static_cast<double>(ceil_div(queries, block_m) * block_m);
  };
  return rows_of(few) <= kFewerRows * rows_of(many) && std::max(queries, keys) <= sm90::most_of_few_queries(dims);
}

sm90::ForwardShape few_queries_shape(Draft& draft, const sm90::HeadDims& dims) {
  const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewQueries);
  draft.because("tiles for few queries, in ", counted(few.ctas_per_sm, "CTA"),
                " an SM: with more or fewer rows, sequences of ", typical_queries(draft.p),
                " queries would leave more warpgroups without any");
  return few;
}

/// Chooses by the cost of a warpgroup's query tile. It is counted in keys: the keys that the warpgroup visits, and the
/// latency of the first and the last step. Both factors were measured on an H200 at 512 to 16384 keys.
sm90::ForwardShape many_or_few_keys_shape(Draft& draft, const sm90::HeadDims& dims) {
  constexpr double kEndTiles = 1.25;  // latency of the first and the last step, in tiles
  const Problem& p = draft.p;
  const sm90::ForwardShape many = sm90::forward_shape(dims, sm90::ForwardTiles::kManyKeys);
  const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewKeys);
  if (!sm90::has_tiles(dims, sm90::ForwardTiles::kFewKeys)) return many;
  const double many_keys = keys_visited(p, many.block_n), few_keys = keys_visited(p, few.block_n);
  const bool fewer =
      sm90::few_keys_cost(dims) * few_keys + kEndTiles * few.block_n < many_keys + kEndTiles * many.block_n;
  const sm90::ForwardShape chosen = fewer ? few : many;
  draft.because("tiles of ", chosen.block_n, " keys: a warpgroup visits ", few_keys, " in tiles of ", few.block_n,
                " and ", many_keys, " in tiles of ", many.block_n,
                "; few cost more each, but less at both ends of a sequence");
  return chosen;
}

/// Bytes of the keys and values of all heads. Sizes need not be those of tensors that exist: an int64_t could overflow.
double key_bytes(const Problem& p) {
  return 2.0 * static_cast<double>(p.batch * p.heads_kv) *
         static_cast<double>(p.seqlen_k * (p.head_dim + p.head_dim_v));
}

/// Returns `chosen`, or the shape for few query tiles if that takes fewer cycles, even when each of them counts as
/// kCostOfCycle and the call as kCostOfCall more: its smaller tiles fill the SMs better, but two warpgroups use the
/// tensor cores less. The CTAs of such a call drift apart, so it needs all keys in `l2_bytes`. Measured on an H200: in
/// 107 of 1167 calls of 128 to 4096 queries over 512 to 32768 keys the rule chooses these tiles, and they are 9.6 %
/// faster on average; 6 of the 107 are 2 % slower or more.
sm90::ForwardShape or_few_tiles_shape(Draft& draft, const sm90::HeadDims& dims, const sm90::ForwardShape& chosen,
                                      int64_t l2_bytes) {
  constexpr double kCostOfCycle = 1.12, kCostOfCall = 3000;
  constexpr int64_t kMostWaves = 4;
  const Problem& p = draft.p;
  if (!sm90::has_tiles(dims, sm90::ForwardTiles::kFewTiles) || has_empty_tensors(p) ||
      key_bytes(p) > static_cast<double>(l2_bytes))
    return chosen;
  const sm90::ForwardShape few = sm90::forward_shape(dims, sm90::ForwardTiles::kFewTiles);
  const auto tiles_of = [&](const sm90::ForwardShape& shape) {
    return p.batch * p.heads_q * ceil_div(p.seqlen_q, shape.warpgroups * sm90::kWarpgroupRows);
  };
  if (tiles_of(few) > kMostWaves * p.num_workers) return chosen;
  const double cycles = forward_cycles(p, dims, few) * kCostOfCycle + kCostOfCall;
  if (cycles >= forward_cycles(p, dims, chosen)) return chosen;
  draft.because("instead, ", tiles_of(few), " tiles of ", few.warpgroups * sm90::kWarpgroupRows, " queries fill ",
                p.num_workers, " SMs better than ", tiles_of(chosen), " of ", chosen.warpgroups * sm90::kWarpgroupRows);
  return few;
}

/// Chooses the tiles of a variant that visits a range of keys; with score options there is one shape.
sm90::ForwardShape choose_forward_shape(Draft& draft, const sm90::HeadDims& dims) {
  const sm90::ForwardShape many = sm90::forward_shape(dims, sm90::ForwardTiles::kManyKeys);
  if (has_score_options(draft.p)) return many;
  if (fills_few_query_tiles(draft.p, dims, many)) return few_queries_shape(draft, dims);
  const sm90::ForwardShape chosen = many_or_few_keys_shape(draft, dims);
  if (draft.p.varlen || draft.p.wants_max_logit) return chosen;
  return or_few_tiles_shape(draft, dims, chosen, kBytesInL2);
}

constexpr unsigned kNeedsOptionsVariant = kBias | kMask | kBlockMask | kDropout;

const char* name_of(sm90::ForwardVariant variant) {
  switch (variant) {
    case sm90::ForwardVariant::kPlain:
      return "scaled products";
    case sm90::ForwardVariant::kScoreOptions:
      return "softcap, ALiBi and any scale";
    case sm90::ForwardVariant::kBias:
      return "bias alone";
    case sm90::ForwardVariant::kMask:
      return "masks alone";
    case sm90::ForwardVariant::kAllButDropout:
      return "all options but dropout";
    case sm90::ForwardVariant::kDropout:
      return "all options";
    case sm90::ForwardVariant::kBlocks:
      return "block mask alone";
    case sm90::ForwardVariant::kCache:
      return "a cache, contiguous or paged";
    case sm90::ForwardVariant::kMaxLogit:
      return "scaled products and max_logit";
  }
  return "";
}

/// The variant with bias, masks or dropout.
sm90::ForwardVariant choose_options_variant(Draft& draft, unsigned features) {
  const Problem& p = draft.p;
  const bool scales_first = sm90::scales_first(p.softcap, p.has_alibi, p.softmax_scale);
  const bool masked = (features & (kMask | kBlockMask)) != 0;
  draft.because("variant of the kernel with", draft.explain ? words_of_all(features & kNeedsOptionsVariant, p) : "",
                ": measured faster than sm80/forward");
  if (p.has_mask) draft.because(kHiddenTiles);
  if ((features & kBiasOfOddRows) != 0) draft.because("bias is copied first, to rows made of 16-byte chunks");
  return sm90::forward_variant({(features & kDropout) != 0, p.has_bias, p.bias_dtype == p.dtype, masked, scales_first});
}

/// What a call has, beside a block mask, that the variant of block masks lacks.
unsigned beside_blocks(unsigned features) {
  return features & ((kNeedsOptionsVariant & ~kBlockMask) | kSoftcap | kAlibi);
}

/// Whether the lists of a block mask drive the loads; else visible tiles are looked for among all tiles.
bool lists_blocks(const Problem& p, unsigned features) {
  const bool others = beside_blocks(features) != 0 || !is_normal_scale(p.softmax_scale);
  const bool window = p.window_left >= 0 || p.window_right >= 0;
  return sm90::lists_blocks(
      {p.has_block_mask ? p.block_m : 0, p.block_n, !others && !window, !p.varlen, p.head_dim, p.head_dim_v});
}

void explain_forward_lists(Draft& draft, unsigned features) {
  const sm90::HeadDims widest = *std::rbegin(sm90::kForwardBlocksHeadDims);
  const sm90::ForwardShape shape = sm90::forward_blocks_shape(widest);
  explain_idle_lists(draft, {beside_blocks(features), is_normal_scale(draft.p.softmax_scale), widest.qk,
                             int64_t{shape.warpgroups} * sm90::kWarpgroupRows, shape.block_n});
}

sm90::ForwardShape blocks_shape(Draft& draft, const sm90::HeadDims& dims) {
  draft.take_variant(name_of(sm90::ForwardVariant::kBlocks));
  const sm90::ForwardShape shape = sm90::forward_blocks_shape(dims);
  draft.because("the lists of the block mask drive the loads: blocks of ", draft.p.block_m, " x ", draft.p.block_n,
                " are multiples of ", sm90::kWarpgroupRows * shape.warpgroups, " x ", shape.block_n,
                "; tiles of queries with the most blocks first");
  return shape;
}

/// Chooses split-KV, for variants that have registers left for it.
void choose_key_splits(Draft& draft, const sm90::HeadDims& dims, const sm90::ForwardShape& shape) {
  const KeySplitsPlan chosen = plan_key_splits(draft.p, dims, shape, draft.explain);
  draft.plan.key_splits = chosen.splits;
  if (!chosen.reason.empty()) draft.because(chosen.reason);
}

/// Chooses the order in which CTAs take query tiles, unless packed sequences have a work list: the list is the order
/// then, and explain_work_list() says so.
void choose_head_order(Draft& draft, const sm90::ForwardShape& shape, bool has_options, bool equal_lengths) {
  const Problem& p = draft.p;
  const int64_t heads = p.batch * p.heads_q;
  if (has_empty_tensors(p) || lists_query_tiles(draft)) return;
  const sm90::HeadsOfCall call = {heads,      p.heads_q / p.heads_kv, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2,
                                  p.seqlen_q, equal_lengths,          p.window_left < 0 && p.window_right < 0,
                                  has_options};
  const sm90::HeadOrder order = sm90::head_order(call, draft.plan.block_m, p.num_workers * shape.ctas_per_sm);
  const int64_t tail = heads - order.last_section;
  draft.plan.section_heads = tail == heads ? heads : order.side_by_side;
  if (!draft.explain) return;
  const bool last_together = tail < heads && tail > order.side_by_side;
  explain_sections(draft, draft.plan.section_heads, heads);
  if (last_together) draft.plan.reasons.back() += text("; of the last ", tail, " heads together, most keys first");
}

void take_forward_shape(Draft& draft, const sm90::HeadDims& dims, const sm90::ForwardShape& shape) {
  draft.plan.block_m = sm90::kWarpgroupRows * shape.warpgroups;
  draft.plan.block_n = shape.block_n;
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": ", counted(shape.warpgroups, "warpgroup"),
                " of ", sm90::kWarpgroupRows, " queries, for head dims up to ", dims.qk,
                dims.v < dims.qk ? text(", of v up to ", dims.v) : "");
}

/// Does the same as choose_head_order(), without the order of the last tiles.
void choose_f32_sections(Draft& draft) {
  const Problem& p = draft.p;
  const int64_t heads = p.batch * p.heads_q;
  if (has_empty_tensors(p) || lists_query_tiles(draft)) return;
  draft.plan.section_heads =
      sm90::forward_f32_section(heads, p.heads_q / p.heads_kv, p.seqlen_k, p.head_dim + p.head_dim_v);
  explain_sections(draft, draft.plan.section_heads, heads);
}

sm90::HeadDims head_dims_of_variant(const Problem& p, bool lists, bool options, bool keeps_max_logit) {
  if (lists) return sm90::first_that_serves(sm90::kForwardBlocksHeadDims, p.head_dim, p.head_dim_v);
  if (keeps_max_logit) return sm90::first_that_serves(sm90::kForwardMaxLogitHeadDims, p.head_dim, p.head_dim_v);
  return sm90::forward_head_dims(p.head_dim, p.head_dim_v, options);
}

/// A call as sm90/forward_short would run it.
struct ShortForward {
  static constexpr int64_t kMostRows = 768;

  int head_dim;
  sm90::ForwardShortShape shape;
  bool runs_at_once;  // all CTAs do

  explicit ShortForward(const Problem& p)
      : head_dim(sm90::forward_short_head_dim(std::max(p.head_dim, p.head_dim_v))),
        shape(sm90::forward_short_shape_for(head_dim, p.seqlen_q, p.seqlen_k, true)),
        runs_at_once(all_run_at_once(p)) {
    if (runs_at_once) return;
    shape = sm90::forward_short_shape_for(head_dim, p.seqlen_q, p.seqlen_k, false);
    runs_at_once = all_run_at_once(p);
  }

  /// Up to so many queries and keys it is faster than sm90/forward, whose CTAs are larger and start later but read keys
  /// for more queries. Measured on H200.
  int64_t most_rows() const {
    if (!runs_at_once) return 128;
    if (head_dim == 64) return kMostRows;
    return shape.warpgroups == 1 ? 512 : 256;
  }

 private:
  bool all_run_at_once(const Problem& p) const {
    const int64_t tiles = p.batch * p.heads_q * ceil_div(p.seqlen_q, sm90::kWarpgroupRows * shape.warpgroups);
    return tiles <= p.num_workers * shape.ctas_per_sm;
  }
};

}  // namespace

void take_score_variant(Draft& draft) {
  draft.take_variant(
      name_of(has_score_options(draft.p) ? sm90::ForwardVariant::kScoreOptions : sm90::ForwardVariant::kPlain));
}

void choose_sm90_forward_tiles(Draft& draft) {
  const Problem& p = draft.p;
  const unsigned features = features_of(p);
  const bool options = (features & kNeedsOptionsVariant) != 0;
  const bool lists = lists_blocks(p, features);
  const bool keeps_max_logit = p.wants_max_logit && !options && !has_score_options(p);
  const sm90::HeadDims dims = head_dims_of_variant(p, lists, options, keeps_max_logit);
  sm90::ForwardShape shape;
  if (lists) {
    shape = blocks_shape(draft, dims);
  } else if (options) {
    const sm90::ForwardVariant variant = choose_options_variant(draft, features);
    draft.take_variant(name_of(variant));
    shape = sm90::forward_options_shape(dims, variant);
    if (p.has_block_mask) explain_forward_lists(draft, features);
  } else if (keeps_max_logit) {
    draft.plan.fuses_max_logit = true;
    draft.take_variant(name_of(sm90::ForwardVariant::kMaxLogit));
    shape = choose_forward_shape(draft, dims);
  } else {
    take_score_variant(draft);
    shape = choose_forward_shape(draft, dims);
  }
  take_forward_shape(draft, dims, shape);
  if (!lists) choose_head_order(draft, shape, options, !p.varlen);
  if (!options && !p.varlen && !has_score_options(p)) choose_key_splits(draft, dims, shape);  // lengths are known
}

bool is_short_sm90_forward(const Problem& p) {
  const int64_t rows = std::max(p.seqlen_q, p.seqlen_k);
  if (p.varlen || p.wants_max_logit || rows > ShortForward::kMostRows) return false;
  return rows <= ShortForward(p).most_rows();
}

void choose_sm90_forward_short_tiles(Draft& draft) {
  const ShortForward call(draft.p);
  const sm90::ForwardShortShape& shape = call.shape;
  draft.plan.block_m = sm90::kWarpgroupRows * shape.warpgroups;
  draft.plan.block_n = shape.block_n;
  draft.plan.section_heads = draft.p.heads_q;
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": ", counted(shape.warpgroups, "warpgroup"),
                " of ", sm90::kWarpgroupRows, " queries, ", shape.ctas_per_sm, " CTAs on an SM, for head dims up to ",
                call.head_dim);
  draft.because(call.runs_at_once ? "all CTAs run at once: up to " : "more CTAs than run at once: up to ",
                call.most_rows(), " queries and keys, this kernel is the faster one");
}

/// The lengths of sequences lie on the device, so splits follow from the capacity of the cache. A split takes its share
/// of the keys that a sequence has.
void choose_sm90_cache_tiles(Draft& draft) {
  const Problem& p = draft.p;
  const sm90::HeadDims dims = sm90::first_that_serves(sm90::kForwardCacheHeadDims, p.head_dim, p.head_dim_v);
  draft.take_variant(name_of(sm90::ForwardVariant::kCache));
  sm90::ForwardShape shape = many_or_few_keys_shape(draft, dims);
  // Over a cache such tiles pay for fewer keys: at 32 MiB they took 3 % less to 7 % more time, at 64 MiB up to 15 %
  // more (docs/tuning/forward_few_queries_sm90.md).
  if (p.num_splits == 0 && p.total_q == 0) shape = or_few_tiles_shape(draft, dims, shape, kBytesInL2 / 2);
  if (p.paged)
    draft.because("pages of ", p.page_size, " rows: TMA copies ", sm90::rows_of_copy(shape.block_n, p.page_size),
                  " at a time");
  take_forward_shape(draft, dims, shape);
  choose_head_order(draft, shape, false, p.total_q == 0);
  if (p.num_splits == 0 && p.total_q == 0) choose_key_splits(draft, dims, shape);
}

void choose_sm90_forward_f32_tiles(Draft& draft) {
  const int head_dim = sm90::forward_f32_head_dim(draft.p.head_dim, draft.p.head_dim_v);
  take_score_variant(draft);
  const sm90::ForwardF32Shape shape = sm90::forward_f32_shape(head_dim);
  draft.plan.block_m = sm90::kWarpgroupRows * shape.warpgroups;
  draft.plan.block_n = shape.keys;
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": ", shape.warpgroups, " warpgroups of ",
                sm90::kWarpgroupRows, " queries, for head dims up to ", head_dim);
  choose_f32_sections(draft);
}

}  // namespace flash_ext::plan
