#include "features.h"

#include <algorithm>

#include "decode.h"
#include "kernels/common/dropout/philox.h"
#include "kernels/common/score/scale.h"
#include "kernels/sm90/backward_short/shape.h"
#include "kernels/sm90/forward/shape.h"
#include "lengths.h"
#include "text.h"

namespace flash_ext::plan {
namespace {

bool drops(const Problem& p) { return dropout_threshold(p.dropout_p) > 0; }

bool has_wide_bias(const Problem& p) {
  return p.has_bias && p.bias_dtype != DType::kFloat16 && p.bias_dtype != DType::kBFloat16;
}

bool has_many_rows(const Problem& p) {
  return std::max(p.seqlen_q, p.seqlen_k) > sm90::backward_short_most_rows(p.head_dim);
}

bool asks_for_order_beside_options(const Problem& p) {
  return p.deterministic && (p.has_bias || p.has_mask || p.has_block_mask || p.has_alibi || p.softcap > 0 || drops(p));
}

bool asks_for_order_beside_masks(const Problem& p) {
  return p.deterministic && (p.has_block_mask || (p.has_mask && !p.mask_per_key));
}

bool decodes_on_cuda(const Problem& p) { return p.operation == Operation::kDecode && p.device == Device::kCuda; }

static_assert(sm90::backward_short_most_rows(64) == 256 && sm90::backward_short_most_rows(128) == 128,
              "the words of kManyRows say so");
static_assert(sm90::kFewestRowsOfCopy == 8, "the words of kPagesOfOddRows say so");

struct FeatureRow {
  Feature feature;
  const char* words;
  bool (*asked)(const Problem&);
};

constexpr FeatureRow kFeatures[] = {
    {kBias, "bias", [](const Problem& p) { return p.has_bias; }},
    {kWideBias, "bias of 32 bits or more", has_wide_bias},
    {kMask, "mask", [](const Problem& p) { return p.has_mask; }},
    {kBlockMask, "block mask", [](const Problem& p) { return p.has_block_mask; }},
    {kDropout, "dropout", drops},
    {kWideBiasBesideMasks, "bias of 32 bits or more beside masks or dropout",
     [](const Problem& p) { return has_wide_bias(p) && (p.has_mask || p.has_block_mask || drops(p)); }},
    {kSoftcap, "softcap", [](const Problem& p) { return p.softcap > 0; }},
    {kAlibi, "ALiBi", [](const Problem& p) { return p.has_alibi; }},
    {kNotPositiveScale, "softmax_scale", [](const Problem& p) { return !is_positive_scale(p.softmax_scale); }},
    {kOwnValueDim, "head_dim", [](const Problem& p) { return p.head_dim != p.head_dim_v; }},
    {kStrideOfZero, "a stride of 0", [](const Problem& p) { return p.broadcast; }},
    {kEmptyTensors, "empty tensors", has_empty_tensors},
    {kTf32, "TF32", [](const Problem& p) { return p.dtype == DType::kFloat32 && p.allow_tf32; }},
    {kDeterministic, "deterministic", [](const Problem& p) { return p.deterministic; }},
    {kDeterministicBesideOptions, "deterministic beside options", asks_for_order_beside_options},
    {kDeterministicBesideMasks, "deterministic beside masks of query-key pairs", asks_for_order_beside_masks},
    {kBiasOfOddRows, "a bias whose rows are not made of 16-byte chunks",
     [](const Problem& p) { return p.has_bias && !copies_bias_in_chunks(p); }},
    {kManyRows, "more than 256 queries or keys (128 beyond head_dim 64)", has_many_rows},
    {kPacked, "packed sequences", [](const Problem& p) { return p.total_q > 0 || p.total_k > 0; }},
    {kGroupedHeads, "grouped heads", [](const Problem& p) { return p.heads_q != p.heads_kv; }},
    {kFewQueries, "so few queries", [](const Problem& p) { return decodes_on_cuda(p) && has_few_queries(p); }},
    {kFewTiles, "fewer query tiles than SMs",
     [](const Problem& p) { return decodes_on_cuda(p) && has_few_tiles(p) && p.total_q == 0; }},
    {kFewPackedTiles, "fewer tiles of packed queries than SMs",
     [](const Problem& p) { return decodes_on_cuda(p) && has_few_tiles(p) && p.total_q > 0; }},
    {kFixedSplits, "num_splits > 1 or batch_invariant",
     [](const Problem& p) { return decodes_on_cuda(p) && (p.num_splits > 1 || p.batch_invariant); }},
    {kPagesOfOddRows, "pages whose rows are no multiple of 8",
     [](const Problem& p) { return p.paged && p.page_size % sm90::kFewestRowsOfCopy != 0; }},
    {kLeftPadOfPages, "cache_leftpad beside pages", [](const Problem& p) { return p.paged && p.has_leftpad; }},
};

}  // namespace

bool copies_bias_in_chunks(const Problem& p) { return p.bias_in_chunks && p.bias_dtype != DType::kFloat64; }

unsigned features_of(const Problem& problem) {
  unsigned found = 0;
  for (const FeatureRow& row : kFeatures)
    if (row.asked(problem)) found |= row.feature;
  return found;
}

std::string words_of_all(unsigned features, const Problem& problem) {
  std::string words;
  for (const FeatureRow& row : kFeatures)
    if ((features & row.feature) != 0) words += text(" ", words_of(row.feature, problem));
  return words;
}

std::string words_of(Feature feature, const Problem& problem) {
  if (feature == kNotPositiveScale) return text("softmax_scale ", problem.softmax_scale);
  if (feature == kOwnValueDim) return text("head_dim ", problem.head_dim_v, " of v beside ", problem.head_dim);
  for (const FeatureRow& row : kFeatures)
    if (row.feature == feature) return row.words;
  return "";
}

}  // namespace flash_ext::plan
