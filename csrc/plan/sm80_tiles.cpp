#include "sm80_tiles.h"

#include "decode.h"
#include "kernels/common/head_dim.h"
#include "kernels/sm80/backward/shape.h"
#include "lengths.h"

namespace flash_ext::plan {
namespace {

constexpr int64_t kFewRows = 16, kManyRows = 64;  // of a tile of decoding

}  // namespace

void leave_tiles_to_the_kernel(Draft&) {}

void choose_sm80_forward_tiles(Draft& draft) {
  if (draft.p.operation == Operation::kDecode) draft.plan.block_m = kPrefillRows;
}

void choose_sm80_decode_tiles(Draft& draft) {
  draft.plan.block_m = sm80_decode_rows(draft.p, draft.plan.head_group);
  draft.because("tile ", draft.plan.block_m,
                " rows: ", draft.p.batch_invariant ? "batch_invariant" : "by the number of queries");
}

int64_t sm80_decode_rows(const Problem& p, int64_t group) {
  const bool few = typical_queries(p) * group <= kFewRows;
  return few || p.batch_invariant || p.dtype == DType::kFloat32 ? kFewRows : kManyRows;
}

int64_t sm80_decode_ctas_per_sm(const Problem& p, int64_t rows) {
  const bool wide = std::max(p.head_dim, p.head_dim_v) > 128, exact = p.dtype == DType::kFloat32;
  if (wide || exact) return wide && exact ? 2 : 3;
  return rows == kManyRows ? 2 : 1;
}

BackwardTiles sm80_backward_tiles(const Problem& p) {
  const bool is_float = p.dtype == DType::kFloat32;
  const bool general = p.softmax_scale <= 0 || p.softcap != 0 || p.has_alibi || p.has_bias || p.has_mask ||
                       p.has_block_mask || p.dropout_p > 0;
  const int head_dim = kernel_head_dim(p.head_dim, p.head_dim_v);
  const sm80::BackwardShape shape = sm80::backward_shape(head_dim, is_float, general, false);
  // mma.sync has about half of the rate of wgmma, and in float a fifth of that.
  const double step = static_cast<double>(shape.block_m * shape.block_n * head_dim) / (is_float ? 25 : 128);
  return {shape.block_m, shape.block_n, head_dim, step, 10000, 1, false};
}

}  // namespace flash_ext::plan
