// Rows of a tensor, converted and contiguous, as the operand A (or the row-major operand B) of a tile product.
//
// A product adds weight * row for weights that are 0 where a key is not seen, and 0 * NaN is NaN. Rows that hold a NaN
// or an infinity are therefore sanitised: the tile has zeros in their place, and the `*_exactly` functions add their
// true contribution to the rows that see them, and to no others.
#pragma once

#include "arena.h"
#include "matrix_tiles.h"
#include "query_panel.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

template <class T>
struct RowTile {
  T* data = nullptr;       // (rows, stride), isolated rows zero
  T* originals = nullptr;  // (rows, stride), defined for isolated rows only
  int32_t* isolated = nullptr;
  int64_t num_isolated = 0;
  int64_t stride = 0;
  int64_t dim = 0;
  uint16_t* halves = nullptr;  // (rows, half_stride) bfloat16, in place of data: zero beyond dim, isolated rows zero
  int64_t half_stride = 0;
  bool in_halves = false;  // which of the two holds the rows

  /// Takes memory for rows of T or, for matrix units, of bfloat16. Both use the same memory; in_halves says which it
  /// holds.
  void take(Arena& arena, int64_t max_rows, int64_t dim_, int64_t stride_, bool for_matrix_units) {
    dim = dim_;
    stride = stride_;
    half_stride = padded_dim(dim);
    in_halves = for_matrix_units;
    const int64_t half_bytes = max_rows * half_stride * static_cast<int64_t>(sizeof(uint16_t));
    char* rows = arena.take<char>(max(max_rows * stride * static_cast<int64_t>(sizeof(T)), half_bytes));
    data = reinterpret_cast<T*>(rows);
    halves = reinterpret_cast<uint16_t*>(rows);
    originals = arena.take<T>(max_rows * stride);
    isolated = arena.take<int32_t>(max_rows);
  }

  const T* original(int64_t r) const { return originals + r * stride; }

  /// Sanitises rows with a NaN or an infinity. `poison` says whether there is one.
  void isolate(int64_t rows, const Poison<T>& poison) {
    num_isolated = 0;
    if (!is_poisoned<T>(poison)) return;
    for (int64_t r = 0; r < rows; ++r) {
      T* values = data + r * stride;
      T sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += values[d] * T(0);
      if (sum == sum) continue;
      isolated[num_isolated++] = static_cast<int32_t>(r);
      for (int64_t d = 0; d < dim; ++d) {
        originals[r * stride + d] = values[d];
        values[d] = 0;
      }
    }
  }

  /// Sanitises one row of bfloat16, for matrix units.
  void isolate_halves(int64_t r) {
    uint16_t* values = halves + r * half_stride;
    isolated[num_isolated++] = static_cast<int32_t>(r);
    for (int64_t d = 0; d < dim; ++d) {
      originals[r * stride + d] = static_cast<T>(bfloat16_to_float(values[d]));
      values[d] = 0;
    }
  }
};

/// Loads keys [begin, end) of k or v.
template <class T>
void load_keys(RowTile<T>& tile, const TensorView& view, DType dtype, const Sequence& seq, int64_t head, int64_t begin,
               int64_t end) {
  const int64_t row_bytes = view.row_stride * size_of(dtype);
  Poison<T> poison{};
  tile.num_isolated = 0;
  int64_t run = 0;
  for (int64_t j = begin; j < end; j += run) {
    const char* from = key_row(view, dtype, seq, j, head, &run);
    run = min(run, end - j);
    // Rows of a head lie far apart, which defeats the hardware's prefetcher: ask for the next tile while this one is
    // worked on.
    int64_t run_ahead;
    const char* ahead = key_row(view, dtype, seq, min(j + kBlockN, seq.seqlen_k - 1), head, &run_ahead);
    for (int64_t r = 0; r < run; ++r) {
      if (r < run_ahead) prefetch_row(ahead + r * row_bytes, tile.dim * size_of(dtype));
      const int64_t row = j - begin + r;
      if constexpr (kHasMatrixUnits<T>) {
        if (tile.in_halves) {
          if (copy_halves(tile.halves + row * tile.half_stride, from + r * row_bytes, tile.dim, tile.half_stride)) {
            tile.isolate_halves(row);
          }
          continue;
        }
      }
      T* to = tile.data + row * tile.stride;
      poison |= load_row(to, from + r * row_bytes, dtype, tile.dim);
      for (int64_t d = tile.dim; d < tile.stride; ++d) to[d] = 0;
    }
  }
  if (tile.in_halves) {  // rows past the last key meet weights of 0, and must be finite
    __builtin_memset(tile.halves + (end - begin) * tile.half_stride, 0,
                     (kBlockN - (end - begin)) * tile.half_stride * sizeof(uint16_t));
  } else {
    tile.isolate(end - begin, poison);
  }
}

/// S[row] = row . B, for the isolated rows in [begin, end) of K or V; b(d, lane) is a number of B.
template <class T, class Operand>
void multiply_exactly(T* s, const RowTile<T>& tile, const Operand& b, int64_t lanes, int64_t begin, int64_t end) {
  constexpr int kPanel = Shape<T>::kPanel;
  for (int64_t n = 0; n < tile.num_isolated; ++n) {
    const int64_t r = tile.isolated[n];
    if (r < begin || r >= end) continue;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      T sum = 0;
      for (int64_t d = 0; d < tile.dim; ++d) sum += tile.original(r)[d] * b(d, lane);
      s[r * kPanel + lane] = sum;
    }
  }
}

/// The weight as products of the other rows use it: on matrix units, rounded to bfloat16.
template <class T>
FLASH_EXT_INLINE T weight_beside([[maybe_unused]] const RowTile<T>& tile, T weight) {
  if constexpr (kHasMatrixUnits<T>) {
    if (tile.in_halves) return bfloat16_to_float(float_to_bfloat16(weight));
  }
  return weight;
}

/// O[:, lane] += weights[row][lane] * row, for the isolated rows in [begin, end), where the weight is not 0.
template <class T>
void accumulate_exactly(T* o, const RowTile<T>& tile, const T* weights, int64_t begin, int64_t end,
                        const LaneLayout& layout = kPanelLayout<T>) {
  constexpr int kPanel = Shape<T>::kPanel;
  for (int64_t n = 0; n < tile.num_isolated; ++n) {
    const int64_t r = tile.isolated[n];
    if (r < begin || r >= end) continue;
    for (int lane = 0; lane < layout.lanes; ++lane) {
      const T weight = weight_beside(tile, weights[r * kPanel + lane]);
      if (weight == T(0)) continue;
      for (int64_t d = 0; d < tile.dim; ++d) o[layout.at(d, lane)] += weight * tile.original(r)[d];
    }
  }
}

/// C[key] += weights[key][query] * row, for the isolated rows of queries, where the weight is not 0. Weights and keys
/// as in accumulate_panels.
template <class T>
void accumulate_panels_exactly(T* c, const T* weights, int64_t panel_stride, const Interval* keys,
                               const RowTile<T>& tile) {
  constexpr int kPanel = Shape<T>::kPanel;
  for (int64_t n = 0; n < tile.num_isolated; ++n) {
    const int64_t r = tile.isolated[n];
    const T* lane = weights + r / kPanel * panel_stride + r % kPanel;
    for (int64_t key = keys[r / kPanel].begin; key < keys[r / kPanel].end; ++key) {
      const T weight = weight_beside(tile, lane[key * kPanel]);
      if (weight == T(0)) continue;
      for (int64_t d = 0; d < tile.dim; ++d) c[key * tile.stride + d] += weight * tile.original(r)[d];
    }
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
