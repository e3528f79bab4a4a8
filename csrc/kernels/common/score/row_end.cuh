// How a row ends: what normalises out, and its log-sum-exp.
#pragma once

#include "units.cuh"

namespace flash_ext {

/// What normalises a row of out, and its log-sum-exp.
struct RowEnd {
  float scale;
  float lse;
};

/// `sum` is of exponentials of scores less reference * scale, `sink` a natural logarithm, -inf = none. A row that saw
/// nothing has sum 0; one with an infinite score has the weights Inf / Inf, and an infinite lse. That is rounded once:
/// a key far above all others has its very score for an lse, whatever the reference is.
template <class Unit = BaseTwoUnit>
__device__ __forceinline__ RowEnd finish_row(float reference, float sum, float sink, float scale = 1.0f) {
  if (sum == 0.0f) return {0.0f, -INFINITY};
  if (reference == INFINITY) return {NAN, INFINITY};
  if (sink == -INFINITY) return {1.0f / sum, fmaf(reference, scale * Unit::kNaturalPer, logf(sum))};
  if (sink == INFINITY) return {0.0f, INFINITY};
  const float score = reference * scale, of_sink = sink * Unit::kPerNatural, base = fmaxf(score, of_sink);
  const float shrink = Unit::exp(score - base);
  const float total = sum * shrink + Unit::exp(of_sink - base);
  return {shrink / total, base * Unit::kNaturalPer + logf(total)};
}

}  // namespace flash_ext
