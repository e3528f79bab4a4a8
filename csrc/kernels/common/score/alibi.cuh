// ALiBi: what it takes off a score is slope * |i + diagonal - j|.
#pragma once

#include "kernels/common/accumulators.cuh"

namespace flash_ext {

/// That of a lane's accumulators.
template <bool kTransposed>
struct AlibiOfLane {
  float slope;     // in units of scores
  float distance;  // of the lane's first key from what its first query is aligned with: i + diagonal - j

  /// The score x of an accumulator, with it.
  __device__ __forceinline__ float add(float x, int m, int n, int e) const {
    const int down = 16 * m + 8 * (e / 2), along = 8 * n + e % 2;
    return fmaf(-slope, fabsf(distance + static_cast<float>(kTransposed ? along - down : down - along)), x);
  }
  template <int kM, int kN>
  __device__ __forceinline__ void add(float (&s)[kM][kN][4]) const {
    for_each_score(s, [&](float& x, int m, int n, int e) { x = add(x, m, n, e); });
  }
};

}  // namespace flash_ext
