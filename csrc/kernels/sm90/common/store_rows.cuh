// Stores 16 rows of a warp's accumulators to shared or to global memory.
#pragma once

#include <cstdint>

#include "kernels/ptx/arithmetic.h"
#include "kernels/ptx/stmatrix.h"
#include "matrix_descriptor.h"
#include "warpgroup.h"

namespace flash_ext::sm90 {

/// Writes out to rows [first_row, + 16) of a tile of panels with kRows rows. A lane gives the address of a row of one
/// of four 8 x 8 matrices: two of rows by two of columns.
template <class Element, int kRows = kWarpgroupRows, int kD>
__device__ __forceinline__ void write_out_tile(uint32_t s_tile, const float (&out)[kD][4], const float (&scale)[2],
                                               int first_row, int lane) {
  const int row = first_row + lane % 16, right = lane / 16;
  const uint32_t s_row = s_tile + row * kPanelRowBytes;
#pragma unroll
  for (int d = 0; d < kD; d += 2) {
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k)
      w[k] =
          ptx::pack2<Element>(out[d + k / 2][k % 2 * 2] * scale[k % 2], out[d + k / 2][k % 2 * 2 + 1] * scale[k % 2]);
    const uint32_t chunk = (d % 8 + right) ^ (row & 7);
    ptx::stmatrix_x4(s_row + d / 8 * panel_bytes(kRows) + chunk * 16, w[0], w[1], w[2], w[3]);
  }
}

/// Exchanges words between two lanes: the lower lane gets a of both, the upper lane b of both.
__device__ __forceinline__ void exchange(uint32_t& a, uint32_t& b, bool upper, int distance) {
  const uint32_t theirs = __shfl_xor_sync(~0u, upper ? a : b, distance);
  (upper ? a : b) = theirs;
}

/// Writes row r of the two rows that four lanes hold, or nothing if g_row is null. A lane holds two of every eight
/// columns. The lanes exchange their parts of 32 columns, so that each has eight neighbouring columns.
template <class Element, int kD>
__device__ __forceinline__ void write_out_row(Element* g_row, const float (&out)[kD][4], int r, float scale, int lane,
                                              int columns) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int d = 0; d < kD; d += 4) {
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) w[k] = ptx::pack2<Element>(out[d + k][2 * r] * scale, out[d + k][2 * r + 1] * scale);
    exchange(w[0], w[1], odd, 1);
    exchange(w[2], w[3], odd, 1);
    exchange(w[0], w[2], upper, 2);
    exchange(w[1], w[3], upper, 2);
    const int column = 8 * (d + lane % 4);
    if (g_row && column < columns) *reinterpret_cast<uint4*>(g_row + column) = uint4{w[0], w[1], w[2], w[3]};
  }
}

}  // namespace flash_ext::sm90
