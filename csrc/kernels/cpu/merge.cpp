#include "merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "convert.h"
#include "scratch.h"

namespace flash_ext::cpu {
namespace {

using namespace FLASH_EXT_ISA;

constexpr int64_t kGrainElements = 16384;  // per task, so that threads are worth their start

struct Row {
  int64_t batch, i, head;
};

Row row_at(const MergeParams& p, int64_t n) { return {n / (p.seqlen * p.heads), n / p.heads % p.seqlen, n % p.heads}; }

char* rows_at(const TensorView& view, DType dtype, const Row& r, int64_t split = 0, int64_t split_stride = 0) {
  return static_cast<char*>(view.data) +
         (split * split_stride + r.batch * view.batch_stride + r.i * view.row_stride + r.head * view.head_stride) *
             size_of(dtype);
}

template <class T>
T& lse_at(const LseView& view, const Row& r, int64_t split = 0, int64_t split_stride = 0) {
  return static_cast<T*>(
      view.data)[split * split_stride + r.batch * view.batch_stride + r.head * view.head_stride + r.i];
}

template <class T>
T merged_lse(const MergeParams& p, const Row& r) {
  T largest = -std::numeric_limits<T>::infinity();
  for (int64_t s = 0; s < p.splits; ++s) largest = std::max(largest, lse_at<T>(p.lses, r, s, p.lses_split_stride));
  const T shift = std::isinf(largest) && largest < 0 ? T(0) : largest;  // -inf - (-inf) would be NaN
  T sum = 0;
  for (int64_t s = 0; s < p.splits; ++s) sum += std::exp(lse_at<T>(p.lses, r, s, p.lses_split_stride) - shift);
  return shift + std::log(sum);
}

/// The weight of a part in the merged result.
template <class T>
T share_of(T part, T whole) {
  return std::isinf(part) && part < 0 ? T(0) : std::exp(part - whole);
}

template <class T>
void merge_row(const MergeParams& p, const Row& r, T* part, T* sum) {
  const T lse = merged_lse<T>(p, r);
  std::fill_n(sum, p.head_dim, T(0));
  for (int64_t s = 0; s < p.splits; ++s) {
    const T share = share_of(lse_at<T>(p.lses, r, s, p.lses_split_stride), lse);
    if (share == 0) continue;
    load_row(part, rows_at(p.outs, p.dtype, r, s, p.outs_split_stride), p.dtype, p.head_dim);
    for (int64_t d = 0; d < p.head_dim; ++d) sum[d] += share * part[d];
  }
  store_row(rows_at(p.out, p.dtype, r), p.dtype, sum, p.head_dim);
  lse_at<T>(p.lse, r) = lse;
}

/// <grad, part - out>, summed in double: if the parts are close to each other, little is left of the sum.
template <class T>
T dot_difference(const T* grad, const T* part, const T* out, int64_t dim) {
  double sum = 0;
  for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(grad[d]) * (static_cast<double>(part[d]) - out[d]);
  return static_cast<T>(sum);
}

/// `scratch` holds four rows.
template <class T>
void merge_row_backward(const MergeBackwardParams& p, const Row& r, T* scratch) {
  T *grad = scratch, *out = grad + p.head_dim, *part = out + p.head_dim, *scaled = part + p.head_dim;
  const T lse = lse_at<T>(p.lse, r);
  const T total_grad_lse = p.grad_lse.data ? lse_at<T>(p.grad_lse, r) : T(0);
  if (p.grad_out.data) {
    load_row(grad, rows_at(p.grad_out, p.dtype, r), p.dtype, p.head_dim);
    load_row(out, rows_at(p.out, p.dtype, r), p.dtype, p.head_dim);
  } else {
    std::fill_n(grad, p.head_dim, T(0));
  }
  for (int64_t s = 0; s < p.splits; ++s) {
    const T share = share_of(lse_at<T>(p.lses, r, s, p.lses_split_stride), lse);
    T grad_lse = 0;
    std::fill_n(scaled, p.head_dim, T(0));
    if (share != 0) {
      load_row(part, rows_at(p.outs, p.dtype, r, s, p.outs_split_stride), p.dtype, p.head_dim);
      grad_lse = share * (total_grad_lse + (p.grad_out.data ? dot_difference(grad, part, out, p.head_dim) : T(0)));
      for (int64_t d = 0; d < p.head_dim; ++d) scaled[d] = share * grad[d];
    }
    store_row(rows_at(p.grad_outs, p.dtype, r, s, p.grad_outs_split_stride), p.dtype, scaled, p.head_dim);
    lse_at<T>(p.grad_lses, r, s, p.grad_lses_split_stride) = grad_lse;
  }
}

/// Calls rows(begin, end, scratch) over all (batch, i, head), in parallel; the scratch holds `scratch_rows` of T.
template <class T, class Rows>
void for_all_rows(const MergeParams& p, int64_t scratch_rows, ParallelFor parallel_for, const Rows& rows) {
  const int64_t row_elements = std::max<int64_t>(1, p.splits * p.head_dim);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / row_elements);
  const int64_t scratch_bytes = scratch_rows * p.head_dim * static_cast<int64_t>(sizeof(T));
  for_range_with_scratch(p.batch * p.seqlen * p.heads, grain, scratch_bytes, parallel_for, rows);
}

template <class T>
void merge_as(const MergeParams& p, ParallelFor parallel_for) {
  for_all_rows<T>(p, 2, parallel_for, [&p](int64_t begin, int64_t end, void* scratch) {
    T* part = static_cast<T*>(scratch);
    for (int64_t n = begin; n < end; ++n) merge_row<T>(p, row_at(p, n), part, part + p.head_dim);
  });
}

template <class T>
void merge_backward_as(const MergeBackwardParams& p, ParallelFor parallel_for) {
  for_all_rows<T>(p, 4, parallel_for, [&p](int64_t begin, int64_t end, void* scratch) {
    for (int64_t n = begin; n < end; ++n) merge_row_backward(p, row_at(p, n), static_cast<T*>(scratch));
  });
}

}  // namespace

void merge(const MergeParams& params, ParallelFor parallel_for) {
  params.dtype == DType::kFloat64 ? merge_as<double>(params, parallel_for) : merge_as<float>(params, parallel_for);
}

void merge_backward(const MergeBackwardParams& params, ParallelFor parallel_for) {
  params.dtype == DType::kFloat64 ? merge_backward_as<double>(params, parallel_for)
                                  : merge_backward_as<float>(params, parallel_for);
}

}  // namespace flash_ext::cpu
