// The online softmax of a panel of queries (Milakov and Gimelshein 2018), one query per lane:
//   m' = max(m, s),   alpha = e^(m - m'),   p = e^(s - m'),   l' = alpha l + sum p,   O' = alpha O + V^T p.
#pragma once

#include "score_panel.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

template <class T>
struct SoftmaxState {
  static constexpr int kPanel = Shape<T>::kPanel;
  alignas(64) T maximum[kPanel];
  alignas(64) T sum[kPanel];
  alignas(64) T alpha[kPanel];  // the factor by which the last step scaled l and O

  void clear() {
    for (int lane = 0; lane < kPanel; ++lane) {
      maximum[lane] = -static_cast<T>(kInfinity);
      sum[lane] = 0;
      alpha[lane] = 1;
    }
  }

  /// Whether the last step rescaled any lane.
  bool has_scaled() const {
    IntVec<T> scaled{};
    for (int lane = 0; lane < kPanel; lane += Shape<T>::kLanes) scaled |= load(alpha + lane) != T(1);
    return any(scaled);
  }
};

/// The maximum of a column of scores and `start`. It leaves out NaN, which shows in the sum.
template <class T>
FLASH_EXT_INLINE Vec<T> column_maximum(const T* s, int64_t rows, Vec<T> start) {
  constexpr int kPanel = Shape<T>::kPanel;
  Vec<T> m[4] = {start, start, start, start};  // four chains hide the latency
  int64_t n = 0;
  for (; n + 4 <= rows; n += 4, s += 4 * kPanel) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) m[chain] = vector_max(load(s + chain * kPanel), m[chain]);
  }
  for (; n < rows; ++n, s += kPanel) m[0] = vector_max(load(s), m[0]);
  return vector_max(vector_max(m[0], m[1]), vector_max(m[2], m[3]));
}

/// s = e^(s - shift) in place; returns the sum of the column.
template <class T>
FLASH_EXT_INLINE Vec<T> column_exp(T* s, int64_t rows, Vec<T> shift) {
  constexpr int kPanel = Shape<T>::kPanel;
  Vec<T> sum[2] = {};
  int64_t n = 0;
  for (; n + 2 <= rows; n += 2, s += 2 * kPanel) {
#pragma GCC unroll 2
    for (int chain = 0; chain < 2; ++chain) {
      const Vec<T> p = exp<T>(load(s + chain * kPanel) - shift);
      sum[chain] += p;
      store(s + chain * kPanel, p);
    }
  }
  if (n < rows) {
    const Vec<T> p = exp<T>(load(s) - shift);
    sum[0] += p;
    store(s, p);
  }
  return sum[0] + sum[1];
}

/// e^(s - lse) for an lse that is given, 0 where the score is hidden even if lse is NaN.
template <class T>
FLASH_EXT_INLINE Vec<T> probability(const Vec<T>& s, const Vec<T>& lse) {
  const Vec<T> p = exp<T>(s - lse);
  return s == -static_cast<T>(kInfinity) ? Vec<T>{} : p;
}

/// One step over the rows of `scores`, which become p.
template <class T>
FLASH_EXT_INLINE void softmax_step(SoftmaxState<T>& state, const ScorePanel<T>& scores, int vectors) {
  constexpr int kPanel = Shape<T>::kPanel;
  for (int c = 0; c < vectors * Shape<T>::kLanes; c += Shape<T>::kLanes) {
    T* column = scores.s + scores.begin * kPanel + c;
    const int64_t rows = scores.end - scores.begin;
    const Vec<T> before = load(state.maximum + c);
    const Vec<T> maximum = column_maximum(column, rows, before);
    // A query that has seen nothing yet keeps -inf; shifting by it would give -inf + inf.
    const Vec<T> shift = maximum == -static_cast<T>(kInfinity) ? Vec<T>{} : maximum;
    const Vec<T> alpha = exp<T>(before - shift);
    const Vec<T> sum = column_exp(column, rows, shift);
    store(state.maximum + c, maximum);
    store(state.alpha + c, alpha);
    store(state.sum + c, load(state.sum + c) * alpha + sum);
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
