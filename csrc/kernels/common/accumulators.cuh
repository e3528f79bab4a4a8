// The layout of a warp's accumulators: kM tiles of 16 rows by kN tiles of 8 columns, four numbers of each per lane.
#pragma once

namespace flash_ext {

/// The query and the key of each accumulator of a lane: of element e of tile (m, n). kTransposed: rows of the
/// accumulators are keys.
template <bool kTransposed>
struct TileCoordinates {
  int first_row, first_column;  // of element 0 of tile (0, 0)

  __device__ __forceinline__ static TileCoordinates of_lane(int first_row, int first_column, int lane) {
    return {first_row + lane / 4, first_column + 2 * (lane % 4)};
  }
  __device__ __forceinline__ int row(int m, int e) const { return first_row + 16 * m + 8 * (e / 2); }
  __device__ __forceinline__ int column(int n, int e) const { return first_column + 8 * n + e % 2; }
  __device__ __forceinline__ int query(int m, int n, int e) const { return kTransposed ? column(n, e) : row(m, e); }
  __device__ __forceinline__ int key(int m, int n, int e) const { return kTransposed ? row(m, e) : column(n, e); }
};

/// Return the maximum, and the sum, over the four lanes that share a row of the accumulators.
__device__ __forceinline__ float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <int kN>
__device__ __forceinline__ void zero_accumulators(float (&x)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
}

/// Calls f(x, m, n, e) for every accumulator.
template <int kM, int kN, class F>
__device__ __forceinline__ void for_each_score(float (&s)[kM][kN][4], F f) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[m][n][e], m, n, e);
}

}  // namespace flash_ext
