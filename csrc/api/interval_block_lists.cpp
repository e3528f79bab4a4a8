#include "block_lists.h"
#include "operators.h"

namespace flash_ext::api {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct IntervalOptions {
  int64_t seqlen_q, seqlen_k, block_m, block_n, offset, window_left, window_right, num_global, max_bitmaps;
};

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

Tensors4 interval_block_lists(const Tensor& bounds, std::string rule, int64_t seqlen_q, int64_t seqlen_k,
                              int64_t block_m, int64_t block_n, int64_t offset, int64_t window_left,
                              int64_t window_right, int64_t num_global, bool causal, int64_t max_blocks,
                              int64_t max_bitmaps) {
  const DeviceScope scope(bounds);
  check_options({seqlen_q, seqlen_k, block_m, block_n, offset, window_left, window_right, num_global, max_bitmaps});
  const Tensor dense_bounds = made_contiguous(bounds);
  IntervalListsParams params;
  fill_bounds(params, dense_bounds, rule);
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.block_m = static_cast<int32_t>(block_m);
  params.block_n = static_cast<int32_t>(block_n);
  params.offset = offset;
  params.left = window_left;
  params.right = window_right;
  params.num_global = num_global;
  params.causal = causal;
  const int64_t rows = ceil_div(seqlen_q, block_m);
  check_rows(params.batch, rows);
  params.rows = static_cast<int32_t>(rows);
  params.columns = static_cast<int32_t>(ceil_div(seqlen_k, block_n));
  params.max_blocks = max_blocks;
  params.max_bitmaps = static_cast<int32_t>(max_bitmaps);

  const Shape bitmaps = {params.batch * rows * max_bitmaps, block_m, block_n / 32};
  const BlockLists lists = new_lists(bounds, {params.batch, 1, rows + 1}, max_blocks, bitmaps);
  params.offsets = int32_values(lists.offsets);
  params.indices = int32_values(lists.indices);
  params.bitmap_ids = int32_values(lists.bitmap_ids);
  params.bitmaps = int32_values(lists.bitmaps);
  run_interval_block_lists(bounds, params);
  return lists.tensors();
}

}  // namespace

FLASH_EXT_OPERATORS(m) { m.impl("interval_block_lists", TORCH_BOX(&interval_block_lists)); }

}  // namespace flash_ext::api
