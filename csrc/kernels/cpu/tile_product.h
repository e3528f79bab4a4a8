// Products of small tiles with a panel: C (rows x kPanel) += A B.
//
// B and C are panels: kPanel neighbouring numbers of each row, in vectors. A is read one number at a time and
// broadcast, so it may be stored either way round; this is why no score tile is ever transposed:
//   scores      S^T = K Q^T       rows = keys,        A = K row-major,  depth = head_dim
//   forward     O^T += V^T P^T    rows = head_dim_v,  A = V transposed, depth = keys
//   backward    dV  += P^T dO     rows = keys,        A = P^T panels,   depth = queries
#pragma once

#include "kernels/common/mask/tile_range.h"
#include "simd.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// Rows of accumulators that fill the registers when a row has kCols vectors.
template <class T, int kCols>
constexpr int kProductRows = Shape<T>::kRows * Shape<T>::kCols / kCols;

/// kRows x kCols vectors of accumulators in registers.
template <class T, int kRows, int kCols>
struct Accumulators {
  Vec<T> sum[kRows][kCols];

  FLASH_EXT_INLINE void zero() {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sum[r][c] = Vec<T>{};
  }

  FLASH_EXT_INLINE void load_from(const T* tile, int64_t stride) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sum[r][c] = load(tile + r * stride + c * Shape<T>::kLanes);
  }

  FLASH_EXT_INLINE void store_to(T* tile, int64_t stride) const {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) store(tile + r * stride + c * Shape<T>::kLanes, sum[r][c]);
  }

  FLASH_EXT_INLINE void scale_columns(const T* scale) {
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c) {
      const Vec<T> s = load(scale + c * Shape<T>::kLanes);
#pragma GCC unroll 32
      for (int r = 0; r < kRows; ++r) sum[r][c] *= s;
    }
  }

  FLASH_EXT_INLINE void scale_rows(const T* scale) {
#pragma GCC unroll 32
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sum[r][c] *= scale[r];
  }

  FLASH_EXT_INLINE void add_product(const T* a, int64_t row_stride, int64_t depth_stride, const T* b, int64_t b_stride,
                                    int64_t depth) {
    for (int64_t k = 0; k < depth; ++k, a += depth_stride, b += b_stride) {
      Vec<T> b_row[kCols];
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) b_row[c] = load(b + c * Shape<T>::kLanes);
#pragma GCC unroll 32
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> a_value = broadcast<T>(a[r * row_stride]);
#pragma GCC unroll 8
        for (int c = 0; c < kCols; ++c) sum[r][c] += a_value * b_row[c];
      }
    }
  }
};

template <int n>
struct Constant {
  static constexpr int value = n;
};

/// Calls function(Constant<count>) for a count in [1, kMax]; does nothing for 0.
template <int kMax, class Function>
FLASH_EXT_INLINE void with_constant(int64_t count, const Function& function) {
  if constexpr (kMax > 0) {
    if (count == kMax) {
      function(Constant<kMax>{});
    } else {
      with_constant<kMax - 1>(count, function);
    }
  }
}

/// Calls block(row, rows_constant) over [begin, end) in steps of kRows, the rest in one smaller block.
template <int kRows, class Block>
FLASH_EXT_INLINE void for_row_blocks(int64_t begin, int64_t end, const Block& block) {
  for (; begin + kRows <= end; begin += kRows) block(begin, Constant<kRows>{});
  with_constant<kRows - 1>(end - begin, [&](auto rest) __attribute__((always_inline)) { block(begin, rest); });
}

/// S[begin:end] = A[begin:end] B over `depth`; B and S are panels.
template <class T, int kCols = Shape<T>::kCols>
void multiply(T* s, const T* a, int64_t a_stride, const T* b, int64_t depth, int64_t begin, int64_t end) {
  constexpr int kPanel = Shape<T>::kPanel;
  for_row_blocks<kProductRows<T, kCols>>(
      begin, end, [=](int64_t row, auto rows) __attribute__((always_inline)) {
        Accumulators<T, decltype(rows)::value, kCols> acc;
        acc.zero();
        acc.add_product(a + row * a_stride, a_stride, 1, b, kPanel, depth);
        acc.store_to(s + row * kPanel, kPanel);
      });
}

/// Multiplies each row of a panel by `scale`, a number per column.
template <class T>
void scale_columns(T* panel, const T* scale, int64_t num_rows) {
  for (int c = 0; c < Shape<T>::kPanel; c += Shape<T>::kLanes) {
    const Vec<T> factor = load(scale + c);
    T* column = panel + c;
    for (int64_t row = 0; row < num_rows; ++row, column += Shape<T>::kPanel) store(column, load(column) * factor);
  }
}

/// O[0:num_rows] = O * scale + A^T[:, begin:end] P[begin:end]; scale holds a number per column, null = 1.
template <class T, int kCols = Shape<T>::kCols>
void accumulate_transposed(T* o, const T* scale, const T* a, int64_t a_stride, const T* p, int64_t begin, int64_t end,
                           int64_t num_rows) {
  constexpr int kPanel = Shape<T>::kPanel;
  for_row_blocks<kProductRows<T, kCols>>(
      0, num_rows, [=](int64_t row, auto rows) __attribute__((always_inline)) {
        Accumulators<T, decltype(rows)::value, kCols> acc;
        acc.load_from(o + row * kPanel, kPanel);
        if (scale != nullptr) acc.scale_columns(scale);
        acc.add_product(a + begin * a_stride + row, 1, a_stride, p + begin * kPanel, kPanel, end - begin);
        acc.store_to(o + row * kPanel, kPanel);
      });
}

/// C[0:num_rows, 0:num_cols] += sum over panels of A[panel] B[panel], row-major C and B. A[panel] is a panel of
/// num_rows rows, zero outside keys[panel]; panels lie panel_stride apart, and B has kPanel rows for each.
template <class T>
void accumulate_panels(T* c, const T* a, int64_t panel_stride, const Interval* keys, int64_t num_panels, const T* b,
                       int64_t stride, int64_t num_rows, int64_t num_cols) {
  constexpr int kPanel = Shape<T>::kPanel;
  constexpr int kCols = Shape<T>::kCols;
  for (int64_t col = 0; col < num_cols; col += kPanel) {
    for_row_blocks<kProductRows<T, kCols>>(
        0, num_rows, [=](int64_t row, auto rows) __attribute__((always_inline)) {
          constexpr int kRows = decltype(rows)::value;
          Accumulators<T, kRows, kCols> acc;
          acc.load_from(c + row * stride + col, stride);
          for (int64_t n = 0; n < num_panels; ++n) {
            if (keys[n].begin >= row + kRows || keys[n].end <= row) continue;
            acc.add_product(a + n * panel_stride + row * kPanel, kPanel, 1, b + n * kPanel * stride + col, stride,
                            kPanel);
          }
          acc.store_to(c + row * stride + col, stride);
        });
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
