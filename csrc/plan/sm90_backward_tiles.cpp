// Tiles, variants and costs of the backward for Hopper.
#include <algorithm>
#include <iterator>

#include "features.h"
#include "kernels/common/dropout/philox.h"
#include "kernels/sm90/backward_f32/shape.h"
#include "kernels/sm90/backward_short/shape.h"
#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/common/backward/variant.h"
#include "masked_tiles.h"
#include "sm90_tiles.h"

namespace flash_ext::plan {
namespace {

int head_dim_of_kernel(const Problem& p) { return sm90::backward_head_dim(p.head_dim, p.head_dim_v); }

sm90::BackwardAsked asked_of(const Problem& p) {
  const bool in_chunks = copies_bias_in_chunks(p);
  const bool key_padding = p.mask_per_key && !p.has_block_mask;
  const bool drops = dropout_threshold(p.dropout_p) > 0;
  return {p.softcap > 0,
          p.has_alibi,
          drops,
          p.has_bias,
          p.has_bias && p.bias_per_key,
          p.has_mask && key_padding,
          (p.has_mask || p.has_block_mask) && !key_padding,
          in_chunks && p.bias_dtype != DType::kFloat32,
          p.bias_dtype == p.dtype,
          p.softcap > sm90::kLargestSoftcapAlone};
}

/// The options of the variant that serves a problem.
int serving_options(const Problem& p) { return sm90::serving_options(asked_of(p)); }

/// What a call has, beside a block mask, that the variant of block masks lacks.
unsigned beside_blocks(const Problem& p) {
  return features_of(p) & (kBias | kMask | kDropout | kSoftcap | kAlibi | kDeterministic);
}

/// Whether lists made from the block mask say which steps a key tile has.
bool lists_blocks(const Problem& p) {
  const bool window = p.window_left >= 0 || p.window_right >= 0;
  return sm90::lists_blocks(sm90::BackwardBlocksCall{
      p.has_block_mask ? p.block_m : 0, p.block_n, beside_blocks(p) == 0 && !window, !p.varlen, head_dim_of_kernel(p)});
}

/// The shape of the kernel whose products overlap.
sm90::BackwardShape overlapping_shape(const Problem& p) {
  return lists_blocks(p) ? sm90::backward_blocks_shape() : sm90::backward_shape(head_dim_of_kernel(p));
}

int64_t keys_of(const sm90::BackwardShape& shape) { return sm90::kWarpgroupRows * shape.key_groups; }

/// Says what a mask saves, and what the lists of a block mask do. A CTA of narrow heads looks at a per-key mask once.
void explain_masks(Draft& draft) {
  const Problem& p = draft.p;
  if (p.has_mask) draft.because(p.mask_per_key && !has_wide_heads(p) ? kHiddenKeys : kHiddenTiles);
  if (!p.has_block_mask) return;
  if (!lists_blocks(p))
    return explain_idle_lists(
        draft, {beside_blocks(p), true, sm90::kMaxNarrowHeadDim, sm90::kBackwardBlockM, sm90::kWarpgroupRows});
  draft.because("lists of queries, made from the block mask, drive the loads: blocks of ", p.block_m, " x ", p.block_n,
                " are multiples of ", sm90::kBackwardBlockM, " x ", sm90::kWarpgroupRows,
                "; tiles of keys with the most blocks first");
}

/// Sets a variant, and tiles whose keys the warpgroups share. `more` ends the reason.
void take_narrow_tiles(Draft& draft, const char* variant, const sm90::BackwardShape& shape, const char* more = "") {
  draft.take_variant(variant);
  draft.plan.block_m = shape.block_m;
  draft.plan.block_n = keys_of(shape);
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": ", shape.key_groups, " warpgroups of ",
                sm90::kWarpgroupRows, " keys, for head dims up to ", head_dim_of_kernel(draft.p), more);
  explain_masks(draft);
}

/// Names of the variants of the backward, by their options.
struct VariantName {
  int options;
  const char *name, *in_turns;  // in_turns: if a kernel of its own adds to dQ in turns, its name
};
#define ALSO_IN_TURNS(name) name, name ", in turns where dQ is asked for"
constexpr VariantName kVariantNames[] = {
    {0, ALSO_IN_TURNS("scaled products")},
    {sm90::kStepAlibi, ALSO_IN_TURNS("ALiBi alone")},
    {sm90::kStepSoftcapped, ALSO_IN_TURNS("softcap alone")},
    {sm90::kStepBiased, ALSO_IN_TURNS("bias alone")},
    {sm90::kStepKeyBiased, ALSO_IN_TURNS("per-key bias or key-padding mask alone")},
    {sm90::kStepMasked, "masks alone", nullptr},
    {sm90::kStepDrops, ALSO_IN_TURNS("dropout alone")},
    {sm90::kStepBiased | sm90::kStepKeyBiased, ALSO_IN_TURNS("bias and key-padding mask alone")},
    {sm90::kStepDrops | sm90::kStepKeyBiased, ALSO_IN_TURNS("dropout and key-padding mask alone")},
    {sm90::kStepAlibi | sm90::kStepKeyBiased, "ALiBi and key-padding mask alone", nullptr},
    {sm90::kStepSoftcapped | sm90::kStepKeyBiased, "softcap and key-padding mask alone", nullptr},
    {sm90::kStepBiased | sm90::kStepOfElements, "bias by elements alone", nullptr},
    {sm90::kAnyOptions, "all options", nullptr},
};
#undef ALSO_IN_TURNS

const VariantName& name_of_variant(int options) {
  return *std::find_if(std::begin(kVariantNames), std::end(kVariantNames),
                       [&](const VariantName& row) { return row.options == options; });
}

/// The name of the variant that serves a problem. in_turns: the name of the kernel of its own that adds to dQ in turns.
const char* backward_variant(const Problem& p, bool in_turns = false) {
  if (lists_blocks(p)) return "block mask alone";
  const VariantName& found = name_of_variant(serving_options(p));
  return in_turns ? found.in_turns : found.name;
}

constexpr double kCta = 8000;  // cycles of a CTA in addition to its steps
// Cycles of a step, by the head dim of the kernel.
constexpr double kPlainStepOf128 = 3260;
constexpr double kOptionsStepOf64 = 3670, kOptionsStepOf128 = 4170;
constexpr double kWideStepOf192 = 3700, kWideStepOf256 = 4800;
// The persistent kernel: cycles of a step, and of a key tile in addition to its steps.
constexpr double kPersistentStep = 2800, kPersistentTile = 2600;
// The float32 kernel: cycles of a CTA in addition to its steps, and of a step.
constexpr double kF32Cta = 6000;
constexpr double kF32StepOf64 = 5200, kF32StepOf128 = 9800, kF32StepOf192 = 9600, kF32StepOf256 = 10900;

/// Cycles of a step of the pipelined loop: cycles of the plain step times a factor of the option, measured at 4 x 4096.
double pipelined_step_of_128(int options) {
  switch (options) {
    case sm90::kStepSoftcapped:
      return 1.06 * kPlainStepOf128;
    case sm90::kStepAlibi:
      return 1.08 * kPlainStepOf128;
    case sm90::kStepMasked:
      return 1.16 * kPlainStepOf128;
    case sm90::kStepDrops | sm90::kStepKeyBiased:
      return 1.34 * kPlainStepOf128;
    default:
      return 1.26 * kPlainStepOf128;
  }
}

double f32_step(int head_dim) {
  switch (head_dim) {
    case 64:
      return kF32StepOf64;
    case 128:
      return kF32StepOf128;
    case 192:
      return kF32StepOf192;
    default:
      return kF32StepOf256;
  }
}

}  // namespace

bool overlaps_sm90_backward(const Problem& p) {
  return sm90::is_pipelined(head_dim_of_kernel(p)) &&
         (lists_blocks(p) || sm90::pipelines(serving_options(p), p.has_block_mask));
}

bool persists_sm90_backward(const Problem& p) {
  return lists_blocks(p) || (!p.has_block_mask && sm90::persists(serving_options(p)));
}

bool has_wide_heads(const Problem& p) { return head_dim_of_kernel(p) > sm90::kMaxNarrowHeadDim; }

void choose_sm90_backward_tiles(Draft& draft) {
  // Without options, the same kernel adds to dQ in turns or in any order.
  const bool in_turns = draft.p.deterministic && serving_options(draft.p) != 0;
  take_narrow_tiles(draft, backward_variant(draft.p, in_turns), overlapping_shape(draft.p));
}

void choose_sm90_backward_persistent_tiles(Draft& draft) {
  take_narrow_tiles(draft, backward_variant(draft.p, draft.p.deterministic), sm90::backward_persistent_shape(),
                    lists_blocks(draft.p)
                        ? "; persistent, one CTA an SM; three pieces of 32 queries that the mask lists"
                        : "; persistent, one CTA an SM");
}

void choose_sm90_backward_options_tiles(Draft& draft) {
  take_narrow_tiles(draft, backward_variant(draft.p), sm90::backward_shape(head_dim_of_kernel(draft.p)));
}

void choose_sm90_backward_wide_tiles(Draft& draft) {
  const int head_dim = head_dim_of_kernel(draft.p);
  const sm90::BackwardShape shape = sm90::backward_shape(head_dim);
  const int options = sm90::serving_wide_options(asked_of(draft.p), draft.p.seqlen_k % 2 == 0);
  draft.take_variant(options == 0 ? "wide heads" : name_of_variant(options).name);
  draft.plan.block_m = shape.block_m;
  draft.plan.block_n = keys_of(shape);
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": ", shape.key_groups, " CTAs of a cluster, ",
                sm90::kWarpgroupRows, " keys each, for head dims up to ", head_dim);
  explain_masks(draft);
}

void choose_sm90_backward_short_tiles(Draft& draft) {
  const int warpgroups = sm90::backward_short_warpgroups(draft.p.seqlen_q, draft.p.seqlen_k);
  draft.plan.block_m = draft.plan.block_n = warpgroups * sm90::kWarpgroupRows;
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": all queries and keys of a head, ",
                warpgroups, warpgroups == 1 ? " warpgroup" : " warpgroups");
}

void choose_sm90_backward_f32_tiles(Draft& draft) {
  const int head_dim = sm90::backward_f32_head_dim(draft.p.head_dim, draft.p.head_dim_v);
  take_score_variant(draft);
  draft.plan.block_m = sm90::kBackwardF32BlockM;
  draft.plan.block_n = sm90::kBackwardF32BlockN;
  draft.because("tile ", draft.plan.block_m, " x ", draft.plan.block_n, ": three warpgroups share its products, ",
                sm90::backward_f32_ctas_of_cluster(head_dim) > 1 ? "two CTAs of a cluster its columns, " : "",
                "for head dims up to ", head_dim);
}

BackwardTiles sm90_backward_tiles(const Problem& p) {
  const sm90::BackwardShape shape = overlapping_shape(p);
  const int head_dim = head_dim_of_kernel(p), options = serving_options(p);
  const bool is_plain = options == 0 || lists_blocks(p);
  const double step = is_plain ? kPlainStepOf128 : pipelined_step_of_128(options);
  BackwardTiles tiles = {shape.block_m, keys_of(shape), head_dim, step, kCta};
  tiles.splits = !lists_blocks(p);
  return tiles;
}

BackwardTiles sm90_backward_persistent_tiles(const Problem& p) {
  const sm90::BackwardShape shape = sm90::backward_persistent_shape();
  BackwardTiles tiles = {shape.block_m, keys_of(shape), head_dim_of_kernel(p), kPersistentStep, kPersistentTile};
  tiles.splits = !lists_blocks(p);
  return tiles;
}

BackwardTiles sm90_backward_options_tiles(const Problem& p) {
  const int head_dim = head_dim_of_kernel(p);
  const sm90::BackwardShape shape = sm90::backward_shape(head_dim);
  return {shape.block_m, keys_of(shape), head_dim, head_dim == 64 ? kOptionsStepOf64 : kOptionsStepOf128, kCta};
}

BackwardTiles sm90_backward_wide_tiles(const Problem& p) {
  const int head_dim = head_dim_of_kernel(p);
  const sm90::BackwardShape shape = sm90::backward_shape(head_dim);
  return {shape.block_m, keys_of(shape),  head_dim, head_dim == 192 ? kWideStepOf192 : kWideStepOf256,
          kCta,          shape.key_groups};
}

BackwardTiles sm90_backward_f32_tiles(const Problem& p) {
  const int head_dim = sm90::backward_f32_head_dim(p.head_dim, p.head_dim_v);
  return {sm90::kBackwardF32BlockM,
          sm90::kBackwardF32BlockN,
          head_dim,
          f32_step(head_dim),
          kF32Cta,
          sm90::backward_f32_ctas_of_cluster(head_dim)};
}

}  // namespace flash_ext::plan
