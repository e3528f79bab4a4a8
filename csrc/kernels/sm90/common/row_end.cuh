// The end of a row: an approximate form of finish_row().
#pragma once

#include "kernels/common/score/row_end.cuh"
#include "kernels/ptx/arithmetic.h"

namespace flash_ext::sm90 {

/// finish_row() without a sink, to a unit or two in the last place, and without branches. The sum is 0 or at least the
/// least normal number.
__device__ __forceinline__ RowEnd finish_row_approx(float stabiliser, float sum) {
  const bool none = sum == 0.0f, infinite = stabiliser == INFINITY;
  const float scale = infinite ? NAN : ptx::reciprocal_approx(sum);
  const float lse = infinite ? INFINITY : (stabiliser + ptx::log2_approx(sum)) * kLn2;
  return {none ? 0.0f : scale, none ? -INFINITY : lse};
}

}  // namespace flash_ext::sm90
