// Products for one to four queries, as in decoding, where a panel would leave most lanes idle. Vectors run along the
// head dim instead, and Q and O are row-major; scores keep the layout of a panel. Memory limits such calls, so each key
// is read once for all queries.
#pragma once

#include "tile_product.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// With more rows than this, panels are quicker.
template <class T>
constexpr int kFewRows = Shape<T>::kLanes >= 8 ? 4 : Shape<T>::kLanes / 2;

/// S[n][r] = K[n] . Q[r] for kKeys keys. Rows of K and Q are readable, and zero, up to whole vectors.
template <class T, int kRows, int kKeys>
FLASH_EXT_INLINE void multiply_keys(T* s, const T* k, const T* q, int64_t stride) {
  Vec<T> sum[kKeys][kRows] = {};
  for (int64_t d = 0; d < stride; d += Shape<T>::kLanes) {
#pragma GCC unroll 8
    for (int n = 0; n < kKeys; ++n) {
      const Vec<T> key = load(k + n * stride + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sum[n][r] += key * load(q + r * stride + d);
    }
  }
  for (int n = 0; n < kKeys; ++n) {
    for (int r = 0; r < kRows; ++r) s[n * Shape<T>::kPanel + r] = horizontal_sum<T>(sum[n][r]);
  }
}

/// S[begin:end] = K[begin:end] Q^T; both have rows of `stride`.
template <class T, int kRows>
void multiply_rows(T* s, const T* k, const T* q, int64_t stride, int64_t begin, int64_t end) {
  constexpr int kKeys = 8 / kRows;
  int64_t n = begin;
  for (; n + kKeys <= end; n += kKeys) {
    multiply_keys<T, kRows, kKeys>(s + n * Shape<T>::kPanel, k + n * stride, q, stride);
  }
  for (; n < end; ++n) multiply_keys<T, kRows, 1>(s + n * Shape<T>::kPanel, k + n * stride, q, stride);
}

/// O[r] = O[r] * scale[r] + sum over n of P[n][r] V[n], for kCols vectors of each row.
template <class T, int kRows, int kCols>
FLASH_EXT_INLINE void accumulate_columns(T* o, const T* scale, const T* v, int64_t stride, const T* p, int64_t begin,
                                         int64_t end) {
  Accumulators<T, kRows, kCols> acc;
  acc.load_from(o, stride);
  acc.scale_rows(scale);
  acc.add_product(p + begin * Shape<T>::kPanel, 1, Shape<T>::kPanel, v + begin * stride, stride, end - begin);
  acc.store_to(o, stride);
}

/// O = O * scale + P[begin:end]^T V[begin:end]; O and V have rows of `stride`.
template <class T, int kRows>
void accumulate_rows(T* o, const T* scale, const T* v, int64_t stride, const T* p, int64_t begin, int64_t end) {
  constexpr int kCols = 8 / kRows;
  constexpr int64_t kBlock = kCols * Shape<T>::kLanes;
  int64_t d = 0;
  for (; d + kBlock <= stride; d += kBlock) {
    accumulate_columns<T, kRows, kCols>(o + d, scale, v + d, stride, p, begin, end);
  }
  for (; d < stride; d += Shape<T>::kLanes) {
    accumulate_columns<T, kRows, 1>(o + d, scale, v + d, stride, p, begin, end);
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
