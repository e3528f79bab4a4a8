#include "aten_layouts.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace flash_ext::api {
namespace {

/// Whether the whole batch and all heads share the scores.
bool is_shared(const Tensor& scores) { return scores.size(0) == 1 && scores.size(1) == 1; }

/// Whether batch and heads of each of these tensors can be seen as one dimension.
bool all_merge(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& scores) {
  if (k.size(1) != q.size(1) || !merges(q) || !merges(k) || !merges(v)) return false;
  if (!scores || is_shared(*scores)) return true;
  return scores->size(0) == q.size(0) && scores->size(1) == q.size(1) && merges(*scores);
}

int64_t merged_stride(const Tensor& x) { return x.stride(x.size(1) == 1 ? 0 : 1); }

using Order = std::array<int64_t, 4>;

/// Dimensions from the outermost to the innermost one. Dimensions of size 1 may have any stride; they are put first.
Order memory_order(const Tensor& x) {
  Order order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const bool a_counts = x.size(a) != 1, b_counts = x.size(b) != 1;
    return a_counts != b_counts ? b_counts : a_counts && x.stride(a) > x.stride(b);
  });
  return order;
}

}  // namespace

bool merges(const Tensor& x) { return x.size(0) == 1 || x.size(1) == 1 || x.stride(0) == x.size(1) * x.stride(1); }

Arrangement arrangement_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& scores) {
  const int64_t of_seqlen = q.stride(2);
  const bool sequence_outermost = q.size(0) > 1 && of_seqlen > q.stride(0);
  const bool heads_outside = q.size(1) > 1 && of_seqlen < q.stride(1);
  if (q.size(2) == 1 || !(sequence_outermost || heads_outside)) return Arrangement::kByRows;
  if (!all_merge(q, k, v, scores)) return Arrangement::kByRows;
  return sequence_outermost ? Arrangement::kBySequence : Arrangement::kByHeads;
}

Tensor with_strides(const Tensor& x, const Shape& sizes, const Shape& strides, int64_t offset) {
  AtenTensorHandle view = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                                        strides.data(), offset, &view));
  return Tensor(view);
}

Tensor to_rows(Arrangement arrangement, const Tensor& x) {
  const int64_t batch = x.size(0), heads = x.size(1), rows = x.size(2), dim = x.size(3);
  const int64_t of_rows = x.stride(2), of_dim = x.stride(3);
  switch (arrangement) {
    case Arrangement::kByHeads:
      return with_strides(x, {batch * heads, rows, 1, dim}, {merged_stride(x), of_rows, dim * of_dim, of_dim});
    case Arrangement::kBySequence:
      return with_strides(x, {1, rows, batch * heads, dim}, {rows * of_rows, of_rows, merged_stride(x), of_dim});
    default:
      return with_strides(x, {batch, rows, heads, dim}, {x.stride(0), of_rows, x.stride(1), of_dim});
  }
}

Tensor to_scores(Arrangement arrangement, const Tensor& scores) {
  if (arrangement == Arrangement::kByRows || is_shared(scores)) return scores;
  const int64_t heads = scores.size(0) * scores.size(1), rows = scores.size(2), keys = scores.size(3);
  const int64_t of_heads = merged_stride(scores), of_rows = scores.stride(2), of_keys = scores.stride(3);
  if (arrangement == Arrangement::kByHeads) {
    return with_strides(scores, {heads, 1, rows, keys}, {of_heads, rows * of_rows, of_rows, of_keys});
  }
  return with_strides(scores, {1, heads, rows, keys}, {heads * of_heads, of_heads, of_rows, of_keys});
}

Tensor to_lse(Arrangement arrangement, const Tensor& lse) {
  if (arrangement == Arrangement::kByRows) return lse;
  const int64_t heads = lse.size(0) * lse.size(1), rows = lse.size(2);
  const int64_t of_heads = merged_stride(lse), of_rows = lse.stride(2);
  if (arrangement == Arrangement::kByHeads) {
    return with_strides(lse, {heads, 1, rows}, {of_heads, rows * of_rows, of_rows});
  }
  return with_strides(lse, {1, heads, rows}, {heads * of_heads, of_heads, of_rows});
}

Tensor from_rows(Arrangement arrangement, const Tensor& rows, int64_t batch, int64_t heads) {
  const Shape sizes{batch, heads, rows.size(1), rows.size(3)};
  const int64_t of_rows = rows.stride(1);
  switch (arrangement) {
    case Arrangement::kByHeads:
      return with_strides(rows, sizes, {heads * rows.stride(0), rows.stride(0), of_rows, 1});
    case Arrangement::kBySequence:
      return with_strides(rows, sizes, {heads * rows.stride(2), rows.stride(2), of_rows, 1});
    default:
      return with_strides(rows, sizes, {rows.stride(0), rows.stride(2), of_rows, 1});
  }
}

Tensor in_order_of(const Tensor& x, const Tensor& like) {
  const Order order = memory_order(like);
  if (x.numel() == 0 || order == memory_order(x)) return x;
  Shape sizes = shape_of(x), strides(4);
  int64_t stride = 1;
  for (size_t i = 4; i-- > 0;) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]];
  }
  Tensor ordered = new_empty_strided(x, sizes, strides, x.scalar_type());
  return torch::stable::copy_(ordered, x);
}

bool has_zero_stride(const Tensor& x) {
  const auto strides = x.strides();
  return std::find(strides.begin(), strides.end(), 0) != strides.end();
}

}  // namespace flash_ext::api
