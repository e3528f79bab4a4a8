// ALiBi subtracts slope * |i + diagonal - j| from a score.
#pragma once

#include "kernels/common/accumulators.cuh"

namespace flash_ext {

/// ALiBi for the accumulators of a lane.
template <bool kTransposed>
struct AlibiOfLane {
  float slope;     // in units of scores
  float distance;  // i + diagonal - j of the lane's first query i and first key j

  /// The score x of an accumulator with ALiBi added.
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
