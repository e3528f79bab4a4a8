// Hides the scores of a tile that window and lengths hide.
#pragma once

#include "kernels/common/accumulators.cuh"
#include "kernels/common/sequence.cuh"

namespace flash_ext {

/// Sets scores outside of the window or the lengths to -inf.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void hide_outside_window(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at,
                                                    const Sequence& sequence) {
  if constexpr (kTransposed) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = at.column(n, c);
        const int begin = i < sequence.seqlen_q ? sequence.keys_begin(i) - at.first_row : INT32_MAX;
        const int end = sequence.keys_end(i) - at.first_row;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (16 * m + 8 * r < begin || 16 * m + 8 * r >= end) s[m][n][2 * r + c] = -INFINITY;
      }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = at.row(m, 2 * r);
        const int begin = sequence.keys_begin(i) - at.first_column;
        const int end = sequence.keys_end(i) - at.first_column;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (8 * n + c < begin || 8 * n + c >= end) s[m][n][2 * r + c] = -INFINITY;
      }
  }
}

}  // namespace flash_ext
