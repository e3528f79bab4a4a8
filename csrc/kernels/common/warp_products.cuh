// Matrix products of one warp on tiles in shared memory, the same interface for every element type.
//
// A step multiplies A (16 x kDepth) by B (kDepth x 16, two neighbouring tiles of 8 columns) into C (16 x 16, float).
// In memory either operand may lie along the depth ("rows": row-major A, or B as rows of its transpose) or across it
// ("transposed"). The order of the depth within a step is the operand's own affair, as long as A and B agree: that
// lets accumulators become an A operand without any exchange between lanes.
//
// C: with g = lane / 4 and t = lane % 4, c[0..1] are row g, columns 2t and 2t + 1; c[2..3] the same of row g + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/ptx/arithmetic.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/mma.h"
#include "kernels/ptx/stmatrix.h"
#include "tile.cuh"

namespace flash_ext {

/// 16-bit elements; float is specialised in warp_products_tf32.cuh.
template <class Element, int kColumns>
struct Products {
  using Layout = TileLayout<Element, kColumns>;
  static constexpr int kDepth = 16;
  static constexpr int kRowBytes = Layout::kRowBytes;

  struct A {
    uint32_t r[4];
  };
  struct B {
    uint32_t r[4];  // two registers for each tile of 8 columns
  };

  /// What a lane adds to a tile's address; `load_*` take the sum.
  __device__ __forceinline__ static uint32_t lane_a(int lane) { return Layout::at(lane % 16, lane / 16); }
  __device__ __forceinline__ static uint32_t lane_b(int lane) {
    return Layout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  __device__ __forceinline__ static uint32_t lane_a_transposed(int lane) { return lane_b(lane); }
  __device__ __forceinline__ static uint32_t lane_b_transposed(int lane) { return lane_a(lane); }

  /// A: rows [row, row + 16) of the tile, columns [16 step, + 16). `row` is a multiple of 8.
  __device__ __forceinline__ static void load_a(A& a, uint32_t s_lane, int row, int step) {
    ptx::ldmatrix_x4(a.r, at_step(s_lane, step) + row * kRowBytes);
  }
  /// B: its columns [row, row + 16) are rows of the tile; the depth is columns [16 step, + 16).
  __device__ __forceinline__ static void load_b(B& b, uint32_t s_lane, int row, int step) {
    ptx::ldmatrix_x4(b.r, at_step(s_lane, step) + row * kRowBytes);
  }
  /// A: its rows are columns [16 pair, + 16) of the tile; the depth is rows [16 step, + 16).
  __device__ __forceinline__ static void load_a_transposed(A& a, uint32_t s_lane, int pair, int step) {
    ptx::ldmatrix_x4_trans(a.r, at_step(s_lane, pair) + step * 16 * kRowBytes);
  }
  /// B: its columns are columns [16 pair, + 16) of the tile; the depth is rows [16 step, + 16).
  __device__ __forceinline__ static void load_b_transposed(B& b, uint32_t s_lane, int pair, int step) {
    ptx::ldmatrix_x4_trans(b.r, at_step(s_lane, pair) + step * 16 * kRowBytes);
  }

  /// A out of the accumulators of tiles of 8 columns: its depth is columns [16 step, + 16). The matching B is
  /// load_b_transposed.
  template <int kTiles>
  __device__ __forceinline__ static void a_from_accumulators(A& a, const float (&c)[kTiles][4], int step) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      a.r[e] = ptx::pack2<Element>(c[2 * step + e / 2][e % 2 * 2], c[2 * step + e / 2][e % 2 * 2 + 1]);
  }

  __device__ __forceinline__ static void multiply(float (&left)[4], float (&right)[4], const A& a, const B& b) {
    ptx::mma_m16n8k16<Element>(left, a.r, b.r[0], b.r[1]);
    ptx::mma_m16n8k16<Element>(right, a.r, b.r[2], b.r[3]);
  }
  /// The same, with the bits of the product of B and A. Only floats differ there, because they are split.
  __device__ __forceinline__ static void multiply_transposed(float (&left)[4], float (&right)[4], const A& a,
                                                             const B& b) {
    multiply(left, right, a, b);
  }

  /// Where a lane's two neighbours in row `row` of the `tile`-th 8 columns of accumulators belong in a tile.
  __device__ __forceinline__ static uint32_t pair_at(int row, int tile, int lane) {
    return Layout::at(row, tile) + 4 * (lane % 4);
  }
  __device__ __forceinline__ static void store_pair(uint32_t s_target, float x, float y) {
    store_shared(s_target, ptx::pack2<Element>(x, y));
  }

  /// Accumulators of two tiles of 8 columns, as elements: rows [row, row + 16) and columns [16 pair, + 16) of a tile.
  /// As an A operand they are what a_from_accumulators makes of them.
  __device__ __forceinline__ static uint32_t lane_c(int lane) {
#if __CUDA_ARCH__ >= 900
    return lane_a(lane);
#else
    return pair_at(lane / 4, 0, lane);
#endif
  }
  __device__ __forceinline__ static void store_c(uint32_t s_lane, int row, int pair, const float (&left)[4],
                                                 const float (&right)[4]) {
    store_a_as_c(s_lane, row, pair,
                 {ptx::pack2<Element>(left[0], left[1]), ptx::pack2<Element>(left[2], left[3]),
                  ptx::pack2<Element>(right[0], right[1]), ptx::pack2<Element>(right[2], right[3])});
  }
  /// The same for accumulators that have become an A operand.
  __device__ __forceinline__ static void store_a_as_c(uint32_t s_lane, int row, int pair, const uint32_t (&r)[4]) {
    const uint32_t s_target = at_step(s_lane, pair) + row * kRowBytes;
#if __CUDA_ARCH__ >= 900
    ptx::stmatrix_x4(s_target, r[0], r[1], r[2], r[3]);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) store_shared((s_target ^ (e / 2 << 4)) + e % 2 * 8 * kRowBytes, r[e]);
#endif
  }
  /// The same as an A operand, which is what a_from_accumulators makes of them.
  __device__ __forceinline__ static uint32_t lane_a_of_c(int lane) { return lane_a(lane); }
  __device__ __forceinline__ static void load_a_of_c(A& a, uint32_t s_lane, int row, int pair) {
    load_a(a, s_lane, row, pair);
  }
  __device__ __forceinline__ static void load_c(uint32_t s_lane, int row, int pair, float (&left)[4],
                                                float (&right)[4]) {
    const uint32_t s_source = at_step(s_lane, pair) + row * kRowBytes;
    uint32_t r[4];
#if __CUDA_ARCH__ >= 900
    ptx::ldmatrix_x4(r, s_source);
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) r[e] = load_shared<uint32_t>((s_source ^ (e / 2 << 4)) + e % 2 * 8 * kRowBytes);
#endif
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 pair_of_row = ptx::unpack2<Element>(r[e]);
      float* const target = (e / 2 ? right : left) + e % 2 * 2;
      target[0] = pair_of_row.x;
      target[1] = pair_of_row.y;
    }
  }
};

/// c += A B^T by kSteps of the depth, where both lie as rows: A from row `row` of its tile on. kTransposed: with the
/// bits of the product of B and A (multiply_transposed).
template <class Products, int kSteps, int kUnroll, bool kTransposed = false, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][kN][4], uint32_t s_lane_a, uint32_t s_lane_b,
                                              int row = 0) {
#pragma unroll kUnroll
  for (int step = 0; step < kSteps; ++step) {
    typename Products::A a[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) Products::load_a(a[m], s_lane_a, row + 16 * m, step);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      typename Products::B b;
      Products::load_b(b, s_lane_b, 8 * n, step);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kTransposed) {
          Products::multiply_transposed(c[m][n], c[m][n + 1], a[m], b);
        } else {
          Products::multiply(c[m][n], c[m][n + 1], a[m], b);
        }
      }
    }
  }
}

}  // namespace flash_ext
