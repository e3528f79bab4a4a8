#include "block_lists.h"

namespace flash_ext::api {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

/// Sets the rule, and checks that `bounds` fits it.
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

}  // namespace flash_ext::api
