#include "score_options.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "aten_layouts.h"
#include "device.h"
#include "kernels/common/score/bias_view.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

/// Elements of memory from the first that a view reads to the last.
int64_t spanned_elements(const ScoreView& view, const Tensor& scores) {
  const int64_t strides[] = {view.batch_stride, view.head_stride, view.row_stride, view.col_stride};
  int64_t span = 1;
  for (int64_t d = 0; d < 4; ++d) span += (scores.size(d) - 1) * strides[d];
  return span;
}

/// The number of elements of a view; a broadcast dimension counts once.
int64_t distinct_elements(const Tensor& scores) {
  int64_t count = 1;
  for (int64_t d = 0; d < 4; ++d) count *= scores.stride(d) == 0 ? 1 : scores.size(d);
  return count;
}

/// Whether bias_in_chunks() copies a bias. Not if it is the same for all queries or all keys: kernels read it in
/// another way. Not float64, which has no chunks. Not a view whose rows share memory, such as a Toeplitz matrix made of
/// one row: the copy would be larger.
bool copies_bias(plan::Operation operation, const Tensor& bias) {
  if (!bias.is_cuda() || (operation != plan::Operation::kForward && operation != plan::Operation::kBackward))
    return false;
  const ScoreView view = view_scores(bias);
  const bool varies = view.row_stride != 0 && view.col_stride != 0;
  return varies && view.dtype != DType::kFloat64 && bias.numel() > 0 && !can_stage_bias(view) &&
         distinct_elements(bias) <= spanned_elements(view, bias);
}

constexpr char kScoreAxes[] = "(batch|1, heads_q|1, seqlen_q|1, seqlen_k|1)";

void check_sequences(const Argument& q, const Geometry& g, const ScoreOptions& options) {
  check_index_tensor("cu_seqlens_q", options.cu_seqlens_q, q, {g.batch + 1}, "(batch + 1)");
  check_index_tensor("cu_seqlens_k", options.cu_seqlens_k, q, {g.batch + 1}, "(batch + 1)");
  check_index_tensor("seqused_q", options.seqused_q, q, {g.batch}, "(batch)");
  check_index_tensor("seqused_k", options.seqused_k, q, {g.batch}, "(batch)");
}

void check_alibi(const Argument& q, const Geometry& g, const Tensor& tensor) {
  const Argument slopes("alibi_slopes", tensor);
  slopes.same_device_as(q).dtype_is(ScalarType::Float).last_dim_contiguous();
  if (tensor.dim() == 2) {
    slopes.shape_is({g.batch, g.heads_q}, "(batch, heads_q)");
  } else {
    slopes.shape_is({g.heads_q}, "(heads_q) or (batch, heads_q)");
  }
}

void check_score_tensors(const Argument& q, const Geometry& g, const ScoreOptions& options) {
  if (options.bias) {
    const Argument bias("bias", *options.bias);
    bias.same_device_as(q).dtype_floating().shape_broadcasts_to(g.score_shape(), kScoreAxes);
  }
  if (options.mask) {
    const Argument mask("mask", *options.mask);
    mask.same_device_as(q).dtype_is(ScalarType::Bool).shape_broadcasts_to(g.score_shape(), kScoreAxes);
  }
  if (options.sink) {
    Argument("sink", *options.sink).same_device_as(q).dtype_floating().shape_is({g.heads_q}, "(heads_q)");
  }
  if (options.alibi_slopes) check_alibi(q, g, *options.alibi_slopes);
}

void check_dropout(const Argument& q, const ScoreOptions& options) {
  if (!options.rng_state) {
    check(!(options.dropout_p > 0), "rng_state must be given with dropout_p > 0: an int64 tensor of (seed, offset)");
    return;
  }
  check(options.dropout_p != 0, "rng_state belongs to dropout: expected None with dropout_p = 0");
  const Argument rng("rng_state", *options.rng_state);
  rng.same_device_as(q).dtype_is(ScalarType::Long).shape_is({2}, "(2), seed and offset").contiguous();
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_block_shapes(const Geometry& g, const ScoreOptions& options) {
  const Argument offsets("block_offsets", *options.block_offsets);
  const Argument indices("block_indices", *options.block_indices);
  const Argument ids("block_bitmap_ids", *options.block_bitmap_ids);
  const Argument bitmaps("block_bitmaps", *options.block_bitmaps);
  indices.contiguous().counts(0, "blocks");
  ids.contiguous().size_is(0, indices.tensor().size(0), "block_indices.size(0)");
  bitmaps.contiguous().counts(0, "bitmaps");
  const int64_t block_m = bitmaps.tensor().size(1), words = bitmaps.tensor().size(2);
  if (block_m == 0 || words == 0) {
    fail(
        "block_bitmaps must have shape (num_bitmaps, block_m, block_n / 32) with blocks of at least one row and 32 "
        "keys",
        ", got ", to_string(shape_of(bitmaps.tensor())));
  }
  constexpr int64_t kMaxBlock = int64_t{1} << 20;
  check(block_m <= kMaxBlock && words * 32 <= kMaxBlock, "block_bitmaps must have blocks of at most ", kMaxBlock,
        " rows and keys, got ", block_m, " rows and ", words, " words of 32 keys");
  const int64_t num_offsets = ceil_div(g.seqlen_q, block_m) + 1;
  offsets.last_dim_contiguous().size_is(2, num_offsets, "ceil(seqlen_q / block_m) + 1");
  offsets.shape_broadcasts_to({g.batch, g.heads_q, num_offsets}, "(batch|1, heads_q|1, num_row_blocks + 1)");
}

void check_block_mask(const Argument& q, const Geometry& g, const ScoreOptions& options) {
  const struct {
    const char* name;
    const OptionalTensor& tensor;
    int64_t rank;
    const char* axes;
  } parts[] = {{"block_offsets", options.block_offsets, 3, "(batch|1, heads_q|1, num_row_blocks + 1)"},
               {"block_indices", options.block_indices, 1, "(num_blocks)"},
               {"block_bitmap_ids", options.block_bitmap_ids, 1, "(num_blocks)"},
               {"block_bitmaps", options.block_bitmaps, 3, "(num_bitmaps, block_m, block_n / 32)"}};
  const auto given = [](const auto& part) { return part.tensor.has_value(); };
  if (std::none_of(std::begin(parts), std::end(parts), given)) return;
  for (const auto& part : parts) {
    check(given(part), part.name, " is missing: a block mask is block_offsets, block_indices, block_bitmap_ids and ",
          "block_bitmaps together");
    Argument(part.name, *part.tensor).same_device_as(q).dtype_is(ScalarType::Int).rank_is(part.rank, part.axes);
  }
  check_block_shapes(g, options);
}

/// The longest sequence, as the plan and the kernels see it. A loose max_seqlen costs nothing: it gives the shape of
/// bias, mask and weights, while the work follows the rows that exist.
int64_t longest_query(const Geometry& g, const ScoreOptions& options) {
  return g.varlen_q ? longest_sequence(*options.cu_seqlens_q, std::min(g.seqlen_q, g.total_q)) : g.seqlen_q;
}
int64_t longest_key(const Geometry& g, const ScoreOptions& options) {
  return g.varlen_k ? longest_sequence(*options.cu_seqlens_k, std::min(g.seqlen_k, g.total_k)) : g.seqlen_k;
}

SequenceParams sequence_params(const ScoreOptions& options) {
  SequenceParams seq;
  seq.cu_seqlens_q = int32_address(options.cu_seqlens_q);
  seq.cu_seqlens_k = int32_address(options.cu_seqlens_k);
  seq.seqused_q = int32_address(options.seqused_q);
  seq.seqused_k = int32_address(options.seqused_k);
  return seq;
}

BlockMaskParams block_mask_params(const ScoreOptions& options) {
  BlockMaskParams blocks;
  if (!options.block_offsets) return blocks;
  const Tensor& offsets = *options.block_offsets;
  const Tensor& bitmaps = *options.block_bitmaps;
  blocks.offsets = int32_address(options.block_offsets);
  blocks.indices = int32_address(options.block_indices);
  blocks.bitmap_ids = int32_address(options.block_bitmap_ids);
  blocks.bitmaps = int32_address(options.block_bitmaps);
  blocks.offsets_batch_stride = offsets.size(0) == 1 ? 0 : offsets.stride(0);
  blocks.offsets_head_stride = offsets.size(1) == 1 ? 0 : offsets.stride(1);
  blocks.num_row_blocks = offsets.size(2) - 1;
  blocks.num_blocks = options.block_indices->size(0);
  blocks.num_bitmaps = bitmaps.size(0);
  blocks.block_m = bitmaps.size(1);
  blocks.block_n = bitmaps.size(2) * 32;
  return blocks;
}

}  // namespace

Shape Geometry::out_shape() const {
  return varlen_q ? Shape{total_q, heads_q, head_dim_v} : Shape{batch, seqlen_q, heads_q, head_dim_v};
}

Shape Geometry::lse_shape() const { return varlen_q ? Shape{heads_q, total_q} : Shape{batch, heads_q, seqlen_q}; }

void check_max_seqlen(const char* name, int64_t max_seqlen) {
  constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // what cu_seqlens can count to
  check(max_seqlen >= 0 && max_seqlen <= kLargest, name, " must be from 0 to ", kLargest, ", got ", max_seqlen);
}

void check_index_tensor(const char* name, const OptionalTensor& tensor, const Argument& q, const Shape& shape,
                        const char* axes) {
  if (tensor) Argument(name, *tensor).same_device_as(q).dtype_is(ScalarType::Int).shape_is(shape, axes).contiguous();
}

void read_query(const Argument& q, const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, Geometry& g) {
  q.dtype_floating();
  g.varlen_q = cu_seqlens_q.has_value();
  if (g.varlen_q) {
    q.rank_is(3, "(total_q, heads_q, head_dim) with cu_seqlens_q");
    const Argument cu_seqlens("cu_seqlens_q", *cu_seqlens_q);
    cu_seqlens.rank_is(1, "(batch + 1)");
    g.batch = cu_seqlens.tensor().size(0) - 1;
    check(g.batch >= 0, "cu_seqlens_q must have shape (batch + 1), got (0,)");
    check_max_seqlen("max_seqlen_q", max_seqlen_q);
    g.seqlen_q = max_seqlen_q;
  } else {
    q.rank_is(4, "(batch, seqlen_q, heads_q, head_dim)");
    g.batch = q.tensor().size(0);
    g.seqlen_q = q.tensor().size(1);
    check(max_seqlen_q == 0 || max_seqlen_q == g.seqlen_q, "max_seqlen_q belongs to cu_seqlens_q: without it expected ",
          "0 or q.size(1) = ", g.seqlen_q, ", got ", max_seqlen_q);
  }
  q.last_dim_contiguous();
  const int64_t rows = g.varlen_q ? 0 : 1;
  q.counts(rows, "rows").counts(rows + 1, "heads");
  g.total_q = q.tensor().size(rows);
  g.heads_q = q.tensor().size(rows + 1);
  g.head_dim = q.tensor().size(rows + 2);
}

void check_options(const Argument& q, const Geometry& geometry, const ScoreOptions& options) {
  check_sequences(q, geometry, options);
  check_score_tensors(q, geometry, options);
  check_dropout(q, options);
  check_block_mask(q, geometry, options);
}

std::optional<Tensor> bias_in_chunks(plan::Operation operation, const OptionalTensor& bias) {
  if (!bias || !copies_bias(operation, *bias)) return std::nullopt;
  Shape distinct = shape_of(*bias), strides(4), row_strides(4);
  for (int64_t d = 0; d < 4; ++d) {
    strides[d] = bias->stride(d);
    if (strides[d] == 0) distinct[d] = 1;
  }
  const int64_t chunk = 16 / static_cast<int64_t>(bias->element_size());
  const int64_t columns = (distinct[3] + chunk - 1) / chunk * chunk;
  Tensor rows = new_empty(*bias, {distinct[0], distinct[1], distinct[2], columns}, bias->scalar_type());
  for (int64_t d = 0; d < 4; ++d) row_strides[d] = rows.stride(d);
  Tensor copy = with_strides(rows, distinct, row_strides);
  torch::stable::copy_(copy, with_strides(*bias, distinct, strides));
  return copy;
}

plan::Problem describe(plan::Operation operation, const Tensor& q, const Geometry& g, const ScoreOptions& options) {
  plan::Problem problem;
  problem.operation = operation;
  describe_device(q, problem);
  problem.dtype = *kernel_dtype(q.scalar_type());
  problem.batch = g.batch;
  problem.heads_q = g.heads_q;
  problem.heads_kv = g.heads_kv;
  problem.seqlen_q = longest_query(g, options);
  problem.seqlen_k = longest_key(g, options);
  problem.total_q = g.varlen_q ? g.total_q : 0;
  problem.total_k = g.varlen_k ? g.total_k : 0;
  problem.head_dim = g.head_dim;
  problem.head_dim_v = g.head_dim_v > 0 ? g.head_dim_v : g.head_dim;
  problem.softmax_scale = options.softmax_scale;
  problem.softcap = options.softcap;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.top_left = options.top_left;
  problem.dropout_p = options.dropout_p;
  problem.allow_tf32 = options.allow_tf32;
  problem.varlen = g.varlen_q || g.varlen_k || options.seqused_q || options.seqused_k;
  problem.has_bias = options.bias.has_value();
  if (options.bias) {
    const ScoreView bias = view_scores(*options.bias);
    problem.bias_dtype = bias.dtype;
    problem.bias_in_chunks = can_stage_bias(bias) || copies_bias(operation, *options.bias);
    problem.bias_per_key = same_for_all_queries(bias);
    problem.bias_of_all_batches = bias_of_all_batches(bias);
  }
  problem.has_mask = options.mask.has_value();
  problem.mask_per_key = options.mask && same_for_all_queries(view_scores(*options.mask));
  problem.has_block_mask = options.block_offsets.has_value();
  if (options.block_bitmaps) {
    problem.block_m = options.block_bitmaps->size(1);
    problem.block_n = options.block_bitmaps->size(2) * 32;
  }
  problem.has_alibi = options.alibi_slopes.has_value();
  problem.has_sink = options.sink.has_value();
  return problem;
}

plan::Plan plan_or_fail(const plan::Problem& problem) {
  const plan::Support support = plan::supports(problem);
  check(support.ok, support.reason);
  return plan::make_plan(problem, /*explain=*/false);
}

AttentionParams to_params(const Tensor& q, const Geometry& g, const ScoreOptions& options, const plan::Plan& plan,
                          std::vector<Tensor>& owned) {
  AttentionParams params;
  params.dtype = *kernel_dtype(q.scalar_type());
  params.batch = g.batch;
  params.heads_q = g.heads_q;
  params.heads_kv = g.heads_kv;
  params.head_dim = g.head_dim;
  params.head_dim_v = g.head_dim_v;
  params.seqlen_q = longest_query(g, options);
  params.seqlen_k = longest_key(g, options);
  params.total_q = g.total_q;
  params.total_k = g.total_k;
  params.q = view_rows(owned.emplace_back(with_aligned_rows(q)));
  params.softmax_scale = options.softmax_scale;
  params.softcap = options.softcap;
  if (options.alibi_slopes) {
    params.alibi_slopes = static_cast<const float*>(options.alibi_slopes->const_data_ptr());
    params.alibi_batch_stride = options.alibi_slopes->dim() == 2 ? options.alibi_slopes->stride(0) : 0;
  }
  if (options.bias) params.bias = view_scores(*options.bias);
  if (options.mask) params.mask = view_scores(*options.mask);
  if (options.sink) {
    const Tensor sink = with_dtype(*options.sink, accumulate_dtype(q.scalar_type()));
    params.sink = owned.emplace_back(made_contiguous(sink)).const_data_ptr();
  }
  params.seq = sequence_params(options);
  params.window = {options.window_left, options.window_right, options.top_left};
  params.blocks = block_mask_params(options);
  params.dropout.rule = dropout_rule(options.dropout_p);
  params.allow_tf32 = options.allow_tf32;
  if (options.rng_state) params.dropout.rng = static_cast<const int64_t*>(options.rng_state->const_data_ptr());
  params.block_m = plan.block_m;
  params.head_group = plan.head_group;
  return params;
}

}  // namespace flash_ext::api
