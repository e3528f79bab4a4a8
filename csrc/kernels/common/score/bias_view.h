// Properties of a bias in memory by which the host chooses a kernel and how it loads bias tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace flash_ext {

inline int64_t bias_element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

/// Whether rows of elements of `bytes` bytes can be copied in 16-byte chunks.
inline bool has_rows_of_chunks(const ScoreView& view, int64_t bytes) {
  if (!view.data || view.col_stride != 1) return false;
  const int64_t strides[] = {view.batch_stride, view.head_stride, view.row_stride};
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (const int64_t stride : strides) aligned = aligned && stride * bytes % 16 == 0;
  return aligned;
}

/// Whether bias tiles can be copied in chunks: elements of 2 or 4 bytes, aligned rows.
inline bool can_stage_bias(const ScoreView& bias) {
  return bias.dtype != DType::kFloat64 && has_rows_of_chunks(bias, bias_element_bytes(bias.dtype));
}

/// Whether it is a per-key bias or mask.
inline bool same_for_all_queries(const ScoreView& view) { return view.data && view.row_stride == 0; }

/// Whether batch entries share a bias that heads do not share.
inline bool bias_of_all_batches(const ScoreView& bias) {
  return bias.data && bias.batch_stride == 0 && bias.head_stride != 0;
}

/// Bytes of a bias tile of the backward in shared memory.
constexpr int64_t bias_tile_bytes(DType dtype, int rows, int keys) {
  const bool wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
  return wide ? 4 * rows * keys : rows * std::max(2 * keys, 128);  // rows are at least 128 bytes
}

}  // namespace flash_ext
