// Loads rows of floats into subtiles of their parts (float_parts.cuh).
#pragma once

#include "float_parts.cuh"
#include "kernels/common/sequence.cuh"

namespace flash_ext::sm90 {

/// Replaces NaN by 0 and Inf by a large number (NonFinite::bounded()).
__device__ __forceinline__ Float8 bounded(Float8 x) {
  const auto bound = [](float& y) { y = __uint_as_float(NonFinite<float>::bounded(__float_as_uint(y))); };
  for (float4* const half : {&x.low, &x.high}) bound(half->x), bound(half->y), bound(half->z), bound(half->w);
  return x;
}

/// Loads 64 rows, from first_row on, into kPanels subtiles one after the other, with zeros from end_row and `columns`
/// on. A warpgroup calls it; the subtiles may be in memory of any kind. kBounded: replaces Inf and NaN by bounded().
template <int kPanels, bool kBounded, class Element>
__device__ __forceinline__ void load_subtiles(char* subtiles, const RowSource<Element, false>& rows, int first_row,
                                              int end_row, int columns, int thread) {
  const SubtileThread at(thread);
  __nv_bfloat162 trace = __float2bfloat162_rn(0.0f);  // not used here
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    Float8 x[SubtileThread::kFloat8s];
    const int column = panel * kPanelColumns + at.column;
#pragma unroll
    for (int float8_index = 0; float8_index < SubtileThread::kFloat8s; ++float8_index) {
      const int row = first_row + at.row + float8_index * SubtileThread::kRowStep;
      x[float8_index] = Float8::load(rows.row(row) + column, row < end_row && column < columns);
    }
#pragma unroll
    for (int float8_index = 0; float8_index < SubtileThread::kFloat8s; ++float8_index)
      at.store(subtiles + panel * kSubtileBytes, float8_index, kBounded ? bounded(x[float8_index]) : x[float8_index],
               trace);
  }
}

}  // namespace flash_ext::sm90
