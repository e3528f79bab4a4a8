#include "block_lists.h"

#include <limits>

#include "tensors.h"

namespace flash_ext::api {
namespace {

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t* int32_values(const Tensor& tensor) { return static_cast<int32_t*>(address(tensor)); }

void check_range(const char* name, int64_t value, int64_t least, int64_t most = kMostInt32) {
  check(value >= least && value <= most, name, " must be in [", least, ", ", most, "], got ", value);
}

/// For so many of each; counted in 32 bits, as the tensors count.
BlockLists new_lists(const Tensor& like, const Shape& offsets, int64_t blocks, const Shape& bitmaps) {
  check_range("max_blocks", blocks, 0);
  check(bitmaps[0] <= kMostInt32, "too many bitmaps: ", bitmaps[0], ", at most ", kMostInt32, " are possible");
  return {new_empty(like, offsets, ScalarType::Int), new_empty(like, {blocks}, ScalarType::Int),
          new_empty(like, {blocks}, ScalarType::Int), new_empty(like, bitmaps, ScalarType::Int)};
}

/// Kernels count the rows of all lists, and an offset more for each list, in 32 bits.
void check_rows(int64_t lists, int64_t rows) {
  check(lists == 0 || rows < kMostInt32 / lists, "too many rows of blocks: ", lists, " lists of ", rows, ", at most ",
        kMostInt32, " are possible");
}

// ---- Intervals
// -------------------------------------------------------------------------------------------------------

void check_options(const IntervalOptions& options) {
  check_range("seqlen_q", options.seqlen_q, 0);
  check_range("seqlen_k", options.seqlen_k, 0);
  check_range("block_m", options.block_m, 1);
  check(options.block_n >= 32 && options.block_n % 32 == 0 && options.block_n <= kMostInt32 - options.seqlen_k,
        "block_n must be a multiple of 32, and seqlen_k + block_n at most ", kMostInt32, ", got ", options.block_n,
        " and a seqlen_k of ", options.seqlen_k);
  check_range("offset", options.offset, -kMostInt32);
  check_range("window_left", options.window_left, -1);
  check_range("window_right", options.window_right, -1);
  check_range("num_global", options.num_global, 0);
  check_range("max_bitmaps", options.max_bitmaps, 1);
}

/// The rule, and what `bounds` has to be for it.
void fill_bounds(IntervalListsParams& params, const Tensor& bounds, const std::string& rule) {
  const Argument bounds_arg("bounds", bounds);
  bounds_arg.dtype_in({ScalarType::Int, ScalarType::Long});
  params.bounds = address(bounds);
  params.bounds_are_int64 = bounds.scalar_type() == ScalarType::Long;
  if (rule == "window") {
    bounds_arg.shape_is({0}, "(0), for a window");
    params.rule = IntervalRule::kWindow;
  } else if (rule == "documents") {
    bounds_arg.rank_is(1, "(documents + 1)").counts(0, "bounds");
    check(bounds.size(0) > 0, "bounds must be (documents + 1), got no elements");
    params.rule = IntervalRule::kDocuments;
    params.num_bounds = bounds.size(0);
  } else if (rule == "prefix") {
    bounds_arg.rank_is(1, "(batch)");
    params.rule = IntervalRule::kPrefix;
    params.batch = bounds.size(0);
  } else if (rule == "spans") {
    bounds_arg.rank_is(3, "(batch, spans, 2)").size_is(2, 2, "2, the ends of a span").counts(1, "spans");
    params.rule = IntervalRule::kSpans;
    params.batch = bounds.size(0);
    params.num_bounds = bounds.size(1);
  } else {
    fail("rule must be window, documents, prefix or spans, got ", rule);
  }
}

}  // namespace

BlockListsCall<IntervalListsParams> prepare_interval_block_lists(const Tensor& bounds, const IntervalOptions& options) {
  check_options(options);
  const Tensor dense_bounds = made_contiguous(bounds);
  IntervalListsParams params;
  fill_bounds(params, dense_bounds, options.rule);
  params.seqlen_q = options.seqlen_q;
  params.seqlen_k = options.seqlen_k;
  params.block_m = static_cast<int32_t>(options.block_m);
  params.block_n = static_cast<int32_t>(options.block_n);
  params.offset = options.offset;
  params.left = options.window_left;
  params.right = options.window_right;
  params.num_global = options.num_global;
  params.causal = options.causal;
  const int64_t rows = ceil_div(options.seqlen_q, options.block_m);
  check_rows(params.batch, rows);
  params.rows = static_cast<int32_t>(rows);
  params.columns = static_cast<int32_t>(ceil_div(options.seqlen_k, options.block_n));
  params.max_blocks = options.max_blocks;
  params.max_bitmaps = static_cast<int32_t>(options.max_bitmaps);

  const Shape bitmaps = {params.batch * rows * options.max_bitmaps, options.block_m, options.block_n / 32};
  const BlockLists lists = new_lists(bounds, {params.batch, 1, rows + 1}, options.max_blocks, bitmaps);
  params.offsets = int32_values(lists.offsets);
  params.indices = int32_values(lists.indices);
  params.bitmap_ids = int32_values(lists.bitmap_ids);
  params.bitmaps = int32_values(lists.bitmaps);
  return {params, lists, {dense_bounds}};
}

// ---- Transpose
// -------------------------------------------------------------------------------------------------------

namespace {

/// Checks a mask and fills in what is read of it; copies of what is not contiguous go to `owned`.
void fill_mask(TransposedListsParams& params, const Tensor& offsets, const Tensor& indices, const Tensor& bitmap_ids,
               const Tensor& bitmaps, std::vector<Tensor>& owned) {
  const Argument offsets_arg("offsets", offsets), indices_arg("indices", indices);
  offsets_arg.dtype_is(ScalarType::Int).rank_is(3, "(batch, heads, rows + 1)").counts(0, "batch entries");
  offsets_arg.counts(1, "heads").counts(2, "rows of blocks");
  check(offsets.size(2) > 0, "offsets must be (batch, heads, rows + 1), got shape ", to_string(shape_of(offsets)));
  indices_arg.dtype_is(ScalarType::Int).rank_is(1, "(blocks)").counts(0, "blocks").same_device_as(offsets_arg);
  Argument("bitmap_ids", bitmap_ids)
      .dtype_is(ScalarType::Int)
      .same_device_as(offsets_arg)
      .shape_is(shape_of(indices), "indices.shape");
  Argument("bitmaps", bitmaps)
      .dtype_is(ScalarType::Int)
      .rank_is(3, "(bitmaps, block_m, block_n / 32)")
      .same_device_as(offsets_arg);
  check(bitmaps.size(1) > 0 && bitmaps.size(1) % 32 == 0 && bitmaps.size(2) > 0,
        "bitmaps must be (bitmaps, block_m, block_n / 32) with block_m a multiple of 32, got shape ",
        to_string(shape_of(bitmaps)));

  const auto own = [&](const Tensor& tensor) { return int32_values(owned.emplace_back(tensor)); };
  const Tensor rows = with_contiguous_rows(offsets);
  params.offsets = own(rows);
  params.offsets_batch_stride = rows.stride(0);
  params.offsets_head_stride = rows.stride(1);
  params.indices = own(made_contiguous(indices));
  params.bitmap_ids = own(made_contiguous(bitmap_ids));
  params.bitmaps = own(made_contiguous(bitmaps));
  params.batch = static_cast<int32_t>(offsets.size(0));
  params.heads = static_cast<int32_t>(offsets.size(1));
  params.rows = static_cast<int32_t>(offsets.size(2) - 1);
  params.num_blocks = indices.size(0);
  params.num_bitmaps = bitmaps.size(0);
  params.block_m = bitmaps.size(1);
  params.block_n = bitmaps.size(2) * 32;
}

}  // namespace

BlockListsCall<TransposedListsParams> prepare_block_lists_transposed(const Tensor& offsets, const Tensor& indices,
                                                                     const Tensor& bitmap_ids, const Tensor& bitmaps,
                                                                     int64_t columns, int64_t max_blocks) {
  TransposedListsParams params;
  std::vector<Tensor> owned;
  fill_mask(params, offsets, indices, bitmap_ids, bitmaps, owned);
  check_range("columns", columns, 0);
  check_rows(offsets.size(0) * offsets.size(1), columns);
  params.columns = static_cast<int32_t>(columns);
  params.max_blocks = max_blocks;

  const Shape transposed = {params.num_bitmaps, params.block_n, params.block_m / 32};
  const BlockLists lists = new_lists(offsets, {offsets.size(0), offsets.size(1), columns + 1}, max_blocks, transposed);
  params.transposed_offsets = int32_values(lists.offsets);
  params.transposed_indices = int32_values(lists.indices);
  params.transposed_bitmap_ids = int32_values(lists.bitmap_ids);
  params.transposed_bitmaps = int32_values(lists.bitmaps);
  return {params, lists, owned};
}

}  // namespace flash_ext::api
