#include "add_layer_norm.h"

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "scratch.h"

namespace flash_ext::cpu {
namespace {

using namespace FLASH_EXT_ISA;

constexpr int64_t kGrainElements = 16384;  // per task, so that threads are worth their start

char* row_at(const void* rows, const AddLayerNormParams& p, int64_t row) {
  return static_cast<char*>(const_cast<void*>(rows)) + row * p.width * size_of(p.dtype);
}

/// Adds x and residual and rounds the sum to its dtype. Leaves it in `sum` and in memory: if the sum is not wanted, in
/// out, which is written again at the end.
template <class T>
void add_row(const AddLayerNormParams& p, int64_t row, T* residual, T* sum) {
  load_row(sum, row_at(p.x, p, row), p.dtype, p.width);
  load_row(residual, row_at(p.residual, p, row), p.dtype, p.width);
  for (int64_t d = 0; d < p.width; ++d) sum[d] += residual[d];
  char* stored = row_at(p.sum != nullptr ? p.sum : p.out, p, row);
  store_row(stored, p.dtype, sum, p.width);
  load_row(sum, stored, p.dtype, p.width);
}

template <class T>
void normalise_row(const AddLayerNormParams& p, T* row, const T* weight, const T* bias) {
  double sum = 0, squares = 0;
  for (int64_t d = 0; d < p.width; ++d) sum += row[d];
  const double mean = sum / static_cast<double>(p.width);
  for (int64_t d = 0; d < p.width; ++d) squares += (row[d] - mean) * (row[d] - mean);
  const double scale = 1 / std::sqrt(squares / static_cast<double>(p.width) + p.eps);
  for (int64_t d = 0; d < p.width; ++d) row[d] = static_cast<T>((row[d] - mean) * scale) * weight[d] + bias[d];
}

template <class T>
void load_or_fill(T* row, const void* data, const AddLayerNormParams& p, T absent) {
  if (data != nullptr) {
    load_row(row, static_cast<const char*>(data), p.dtype, p.width);
  } else {
    std::fill_n(row, p.width, absent);
  }
}

template <class T>
void add_layer_norm_as(const AddLayerNormParams& p, ParallelFor parallel_for) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, p.width));
  const int64_t scratch_bytes = 4 * p.width * static_cast<int64_t>(sizeof(T));
  for_range_with_scratch(p.rows, grain, scratch_bytes, parallel_for, [&p](int64_t begin, int64_t end, void* scratch) {
    T* row = static_cast<T*>(scratch);
    T *residual = row + p.width, *weight = residual + p.width, *bias = weight + p.width;
    load_or_fill(weight, p.weight, p, T(1));
    load_or_fill(bias, p.bias, p, T(0));
    for (int64_t n = begin; n < end; ++n) {
      add_row(p, n, residual, row);
      normalise_row(p, row, weight, bias);
      store_row(row_at(p.out, p, n), p.dtype, row, p.width);
    }
  });
}

}  // namespace

void add_layer_norm(const AddLayerNormParams& params, ParallelFor parallel_for) {
  params.dtype == DType::kFloat64 ? add_layer_norm_as<double>(params, parallel_for)
                                  : add_layer_norm_as<float>(params, parallel_for);
}

}  // namespace flash_ext::cpu
