// The end of a row: the factor that normalises out, and its log-sum-exp.
#pragma once

#include "kernels/params.h"
#include "units.cuh"

namespace flash_ext {

/// The sink of a head, -inf where there is none. `head` is read only where there is one.
__device__ __forceinline__ float sink_of(const AttentionParams& p, const int& head) {
  return p.sink ? static_cast<const float*>(p.sink)[head] : -INFINITY;
}

/// The factor that normalises a row of out, and its log-sum-exp (natural logarithm).
struct RowEnd {
  float scale;
  float lse;
};

/// `sum` is the sum of exponentials of the scores minus stabiliser * scale; `sink` is a natural logarithm, -inf = none.
/// A row that saw nothing has sum 0. A row with an infinite score has weights Inf / Inf and an infinite lse. lse is
/// rounded once, so a row with one key far above all others has that key's exact score as its lse.
template <class Unit = BaseTwoUnit>
__device__ __forceinline__ RowEnd finish_row(float stabiliser, float sum, float sink, float scale = 1.0f) {
  if (sum == 0.0f) return {0.0f, -INFINITY};
  if (stabiliser == INFINITY) return {NAN, INFINITY};
  if (sink == -INFINITY) return {1.0f / sum, fmaf(stabiliser, scale * Unit::kNaturalPer, logf(sum))};
  if (sink == INFINITY) return {0.0f, INFINITY};
  const float score = stabiliser * scale, of_sink = sink * Unit::kPerNatural, base = fmaxf(score, of_sink);
  const float shrink = Unit::exp(score - base);
  const float total = sum * shrink + Unit::exp(of_sink - base);
  return {shrink / total, base * Unit::kNaturalPer + logf(total)};
}

}  // namespace flash_ext
