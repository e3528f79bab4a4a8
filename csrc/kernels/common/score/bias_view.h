// How a bias lies in memory, as far as the host goes by it: which kernel, and how it brings tiles of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace flash_ext {

inline int64_t bias_element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

/// Whether the rows of what is `bytes` an element can be copied in pieces of 16 bytes.
inline bool has_rows_of_pieces(const ScoreView& view, int64_t bytes) {
  if (!view.data || view.col_stride != 1) return false;
  const int64_t strides[] = {view.batch_stride, view.head_stride, view.row_stride};
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (const int64_t stride : strides) aligned = aligned && stride * bytes % 16 == 0;
  return aligned;
}

/// Whether tiles can be copied, of elements of 2 or 4 bytes.
inline bool can_stage_bias(const ScoreView& bias) {
  return bias.dtype != DType::kFloat64 && has_rows_of_pieces(bias, bias_element_bytes(bias.dtype));
}

/// A bias, or a mask, of keys alone.
inline bool same_for_all_queries(const ScoreView& view) { return view.data && view.row_stride == 0; }

/// Of a tile of the backward's in shared memory.
constexpr int64_t bias_tile_bytes(DType dtype, int rows, int keys) {
  const bool wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  return wide ? 4 * rows * keys : rows * std::max(2 * keys, 128);  // rows are at least 128 bytes
}

}  // namespace flash_ext
