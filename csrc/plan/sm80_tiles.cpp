#include "sm80_tiles.h"

#include "decode.h"
#include "features.h"
#include "kernels/common/dropout/philox.h"
#include "kernels/common/head_dim.h"
#include "kernels/common/score/bias_view.h"
#include "kernels/common/score/scale.h"
#include "kernels/sm80/backward/shape.h"
#include "kernels/sm80/bias_gradient/shape.h"
#include "kernels/sm80/decode/shape.h"
#include "kernels/sm80/forward/head_order.h"
#include "kernels/sm80/forward/shape.h"
#include "lengths.h"
#include "operations.h"

namespace flash_ext::plan {
namespace {

constexpr int64_t kFewTileRows = 16, kManyTileRows = 64;  // of a tile of decoding

bool is_float(const Problem& p) { return p.dtype == DType::kFloat32; }

sm80::ForwardVariant forward_variant(const Problem& p, int head_dim) {
  const bool in_chunks = copies_bias_in_chunks(p), packed = p.total_q > 0 || p.total_k > 0;
  const sm80::ForwardVariant wanted = sm80::variant_of({p.softmax_scale,
                                                        p.softcap,
                                                        p.has_alibi,
                                                        dropout_threshold(p.dropout_p) > 0,
                                                        p.has_mask,
                                                        p.has_block_mask,
                                                        {p.block_m, p.block_n, p.seqlen_k, p.head_dim},
                                                        packed,
                                                        p.paged,
                                                        p.has_bias,
                                                        in_chunks,
                                                        p.dtype,
                                                        p.bias_dtype});
  return sm80::available_variant(wanted, is_float(p), head_dim);
}

const char* name_of(sm80::ForwardVariant variant) {
  switch (variant) {
    case sm80::ForwardVariant::kPlain:
      return "scaled products";
    case sm80::ForwardVariant::kComputes:
      return "softcap, ALiBi, dropout and any scale";
    case sm80::ForwardVariant::kReads:
      return "all options and pages";
    case sm80::ForwardVariant::kBias:
      return "bias alone";
    case sm80::ForwardVariant::kFloatBias:
      return "float32 bias alone";
    case sm80::ForwardVariant::kMask:
      return "mask alone";
    case sm80::ForwardVariant::kDrops:
      return "dropout alone";
  }
  return "";
}

/// Decides whether tiles of bias come to shared memory: there must be room, and rows of 16-byte chunks.
void choose_bias_staging(Draft& draft, const sm80::ForwardShape& shape, int head_dim) {
  const Problem& p = draft.p;
  const int bytes = sm80::forward_shared_bytes(shape, head_dim, is_float(p));
  const bool in_chunks = copies_bias_in_chunks(p);
  const int available = static_cast<int>(p.shared_bytes_per_cta);
  draft.plan.stages_bias = in_chunks && sm80::has_room_for_bias(shape, bytes, p.bias_dtype, available);
  if (draft.plan.stages_bias) {
    draft.because("bias: its tiles come to shared memory ahead of time");
  } else {
    draft.because("bias: read element by element, ",
                  in_chunks ? "for want of shared memory" : "as its rows are not made of 16-byte chunks");
  }
}

/// Chooses the heads, and the batch entries with the same bias, whose CTAs run side by side.
void choose_head_sections(Draft& draft) {
  const Problem& p = draft.p;
  if (has_empty_tensors(p) || lists_query_tiles(draft)) return;
  const int64_t key_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * (is_float(p) ? 4 : 2);
  const sm80::HeadSections sections =
      sm80::head_sections({p.batch, p.heads_q, p.heads_kv, key_bytes, p.has_bias && p.bias_of_all_batches});
  draft.plan.section_heads = sections.heads;
  draft.plan.section_batches = sections.batches;
  if (!draft.explain) return;
  explain_sections(draft, sections.heads, p.heads_q,
                   sections.batches > 1 ? text(" of ", sections.batches, " batch entries, which share a bias") : "");
}

/// Fills in what the launch decides about splits. The host does not know the lengths of sequences, which lie on the
/// device.
void choose_split_sizes(Draft& draft) {
  Plan& plan = draft.plan;
  const int64_t tiles = query_tiles(draft.p, plan.head_group, plan.block_m);
  if (plan.split_size > 0) {
    plan.split_ctas = sm80::ctas_per_tile(tiles, plan.num_splits);
  } else if (plan.num_splits > 1) {
    plan.min_split_size = sm80::smallest_split(tiles);
  }
  if (!draft.explain) return;
  if (plan.split_ctas > 0) {
    draft.because(counted(plan.split_ctas, "CTA"), " for the splits of each of ", counted(tiles, "tile"),
                  ": most sequences are shorter than the cache");
  } else if (plan.min_split_size > 0) {
    draft.because("a split has ", plan.min_split_size, " keys at least, with ", counted(tiles, "tile"),
                  ": short sequences have fewer splits");
  }
}

/// Chooses the tiling of the backward. It assumes enough shared memory where the size is not known.
sm80::BackwardTiling backward_tiling(const Problem& p, int head_dim) {
  const bool plain = is_positive_scale(p.softmax_scale) && p.softcap == 0 && !p.has_alibi && !p.has_bias &&
                     !p.has_mask && !p.has_block_mask && p.dropout_p == 0;
  if (p.shared_bytes_per_cta == 0) return plain ? sm80::BackwardTiling::kPlain : sm80::BackwardTiling::kAllOptions;
  const sm80::BackwardShape general = sm80::backward_shape(head_dim, is_float(p), sm80::BackwardTiling::kAllOptions);
  const int64_t bias = p.has_bias ? bias_tile_bytes(p.bias_dtype, general.block_m, general.block_n) : 0;
  return sm80::choose_backward_tiling(head_dim, is_float(p), plain, bias, p.shared_bytes_per_cta);
}

const char* name_of(sm80::BackwardTiling tiling) {
  switch (tiling) {
    case sm80::BackwardTiling::kPlain:
      return "scaled products";
    case sm80::BackwardTiling::kAllOptions:
      return "all options";
    case sm80::BackwardTiling::kSmall:
      return "all options in little shared memory";
    case sm80::BackwardTiling::kSlabs:
      return "all options in slabs of columns";
  }
  return "";
}

}  // namespace

void leave_tiles_to_the_kernel(Draft&) {}

void choose_sm80_forward_tiles(Draft& draft) {
  const Problem& p = draft.p;
  const int head_dim = kernel_head_dim(p.head_dim, p.head_dim_v);
  const sm80::ForwardVariant variant = forward_variant(p, head_dim);
  draft.take_variant(name_of(variant));
  if (p.shared_bytes_per_cta == 0) return choose_head_sections(draft);
  const bool small = sm80::takes_small_forward(head_dim, is_float(p), static_cast<int>(p.shared_bytes_per_cta),
                                               static_cast<int>(p.shared_bytes_per_sm));
  const sm80::ForwardShape shape = sm80::forward_shape(head_dim, is_float(p), variant, small);
  draft.plan.block_m = shape.block_m();
  draft.plan.block_n = shape.block_n;
  draft.because("tile ", shape.block_m(), " x ", shape.block_n, ": ", shape.warps, " warps of ", shape.warp_rows,
                " queries, for head dims up to ", head_dim, small ? "; two CTAs share the memory of an SM" : "");
  if (p.has_bias) choose_bias_staging(draft, shape, head_dim);
  choose_head_sections(draft);
}

void choose_sm80_backward_tiles(Draft& draft) {
  const Problem& p = draft.p;
  const int head_dim = kernel_head_dim(p.head_dim, p.head_dim_v);
  const sm80::BackwardTiling tiling = backward_tiling(p, head_dim);
  draft.take_variant(name_of(tiling));
  if (p.shared_bytes_per_cta == 0 || tiling == sm80::BackwardTiling::kSlabs) return;
  const sm80::BackwardShape shape = sm80::backward_shape(head_dim, is_float(p), tiling);
  draft.plan.block_m = shape.block_m;
  draft.plan.block_n = shape.block_n;
  draft.because("tile ", shape.block_m, " x ", shape.block_n, ": ", shape.warps, " warps, for head dims up to ",
                head_dim, ", with ", p.shared_bytes_per_cta, " bytes of shared memory a CTA");
}

void choose_sm80_bias_memory(Draft& draft) {
  const Problem& p = draft.p;
  if (p.shared_bytes_per_cta == 0) return;
  const sm80::BiasShared shared =
      sm80::bias_shared({is_float(p), copies_bias_in_chunks(p), p.bias_dtype, p.has_mask || p.has_block_mask,
                         static_cast<int>(p.shared_bytes_per_cta), static_cast<int>(p.shared_bytes_per_sm)});
  draft.plan.bias_stages = shared.stages;
  draft.plan.bias_kernel_stages_bias = shared.stages_bias;
  draft.because("gradient of bias: ", shared.stages, " stages of slabs, bias ",
                shared.stages_bias ? "in shared memory" : "read element by element");
}

void choose_sm80_decode_tiles(Draft& draft) {
  draft.plan.block_m = sm80_decode_rows(draft.p, draft.plan.head_group);
  draft.because("tile ", draft.plan.block_m,
                " rows: ", draft.p.batch_invariant ? "batch_invariant" : "by the number of queries");
  choose_split_sizes(draft);
}

int64_t sm80_decode_rows(const Problem& p, int64_t group) {
  const bool few = typical_queries(p) * group <= kFewTileRows;
  return few || p.batch_invariant || p.dtype == DType::kFloat32 ? kFewTileRows : kManyTileRows;
}

int64_t sm80_decode_ctas_per_sm(const Problem& p, int64_t rows) {
  const bool wide = std::max(p.head_dim, p.head_dim_v) > 128, exact = p.dtype == DType::kFloat32;
  if (wide || exact) return wide && exact ? 2 : 3;
  return rows == kManyTileRows ? 2 : 1;
}

BackwardTiles sm80_backward_tiles(const Problem& p) {
  const int head_dim = kernel_head_dim(p.head_dim, p.head_dim_v);
  const sm80::BackwardShape shape = sm80::backward_shape(head_dim, is_float(p), backward_tiling(p, head_dim));
  // mma.sync has about half of the rate of wgmma, and in float a fifth of that.
  const double step = static_cast<double>(shape.block_m * shape.block_n * head_dim) / (is_float(p) ? 25 : 128);
  BackwardTiles tiles = {shape.block_m, shape.block_n, head_dim, step, 10000};
  tiles.turns_from_last_keys = true;
  return tiles;
}

}  // namespace flash_ext::plan
