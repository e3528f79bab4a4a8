// max_logit: the largest score that a query of a head sees in a batch entry, a number in memory that CTAs raise.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/params.h"

namespace flash_ext {

/// Raises a float in memory to x; NaN is above all. Compared as integers, non-negative floats ascend, and floats with a
/// sign descend.
__device__ __forceinline__ void atomic_max_or_nan(float* g_target, float x) {
  constexpr int kLargestNaN = 0x7fffffff;
  const int bits = x == x ? __float_as_int(x) : kLargestNaN;
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(g_target), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned*>(g_target), static_cast<unsigned>(bits));
  }
}

/// Raises the head's max_logit to a score in natural units. It is -inf beforehand, and stays so where nothing is seen.
__device__ __forceinline__ void raise_max_logit(const ForwardParams& p, const Sequence& sequence, float score) {
  if (score == -INFINITY) return;
  atomic_max_or_nan(static_cast<float*>(p.max_logit) + sequence.batch * p.heads_q + sequence.head, score);
}

}  // namespace flash_ext
