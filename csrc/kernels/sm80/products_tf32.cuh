// Products of float tiles on tensor cores, which take TF32: 8 bits of exponent and 10 of mantissa.
//
// float: an element is the sum of two TF32 numbers, x = high + low to 2^-22, and
//
//   a b = a_high b_high + (a_high b_low + a_low b_high)            (a_low b_low is below 2^-22)
//
// Tensor cores round their sums towards zero, which over thousands of keys drifts by more than all else; so they add
// up the terms of one step alone, and what goes into C is added by the float units, rounded to nearest.
//
// Tf32: one product of elements rounded to TF32, for callers who allow that.
//
// There is no 32-bit ldmatrix.trans, so "transposed" operands are read by plain loads, in an order of the depth that
// makes accumulators an A operand as they are: depth t of a step is row 2t, depth t + 4 is row 2t + 1. Rows 0, 2, 4, 6
// lie in different banks, as do 1, 3, 5, 7. Operands along the depth keep its natural order, hence a transposed operand
// pairs with a transposed one or with accumulators only.
#pragma once

#include <type_traits>

#include "products.cuh"

namespace flash_ext::sm80 {

/// An element type: a float in memory, whose products may be those of TF32.
struct Tf32 {
  float value;

  Tf32() = default;
  __device__ __forceinline__ explicit Tf32(float value) : value(value) {}
  __device__ __forceinline__ explicit operator float() const { return value; }
};

template <bool kCompensated>
struct Tf32Fragment {
  uint32_t high[4];
  uint32_t low[kCompensated ? 4 : 1];  // what `high` leaves of the elements, if it is kept

  __device__ __forceinline__ void set(int i, float x) {
    high[i] = ptx::to_tf32(x);
    if constexpr (kCompensated) low[i] = ptx::to_tf32(x - __uint_as_float(high[i]));
  }
};

template <class Element, int kColumns>
struct Tf32Products {
  using Layout = TileLayout<Element, kColumns>;
  static constexpr int kDepth = 8;
  static constexpr int kRowBytes = Layout::kRowBytes;
  static constexpr bool kCompensated = std::is_same_v<Element, float>;

  struct A : Tf32Fragment<kCompensated> {};
  struct B : Tf32Fragment<kCompensated> {};  // two for each tile of 8 columns

  /// What a lane adds to a tile's address; `load_*` take the sum.
  __device__ __forceinline__ static uint32_t lane_a(int lane) { return Layout::at(lane % 16, lane / 16); }
  __device__ __forceinline__ static uint32_t lane_b(int lane) {
    return Layout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  __device__ __forceinline__ static uint32_t lane_a_transposed(int lane) {
    return Layout::at(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
  }
  __device__ __forceinline__ static uint32_t lane_b_transposed(int lane) { return lane_a_transposed(lane); }

  /// A: rows [row, row + 16) of the tile, columns [8 step, + 8). `row` is a multiple of 8.
  __device__ __forceinline__ static void load_a(A& a, uint32_t s_lane, int row, int step) {
    load_matrices(a, at_step(s_lane, step) + row * kRowBytes);
  }
  /// B: its columns [row, row + 16) are rows of the tile; the depth is columns [8 step, + 8).
  __device__ __forceinline__ static void load_b(B& b, uint32_t s_lane, int row, int step) {
    load_matrices(b, at_step(s_lane, step) + row * kRowBytes);
  }
  /// A: its rows are columns [16 pair, + 16) of the tile; the depth is rows [8 step, + 8).
  __device__ __forceinline__ static void load_a_transposed(A& a, uint32_t s_lane, int pair, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t s_row = at_step(s_lane, 2 * pair + half) + step * kDepth * kRowBytes;
      a.set(half, load_shared<float>(s_row));
      a.set(half + 2, load_shared<float>(next_row(s_row)));
    }
  }
  /// B: its columns are columns [16 pair, + 16) of the tile; the depth is rows [8 step, + 8).
  __device__ __forceinline__ static void load_b_transposed(B& b, uint32_t s_lane, int pair, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t s_row = at_step(s_lane, 2 * pair + half) + step * kDepth * kRowBytes;
      b.set(2 * half, load_shared<float>(s_row));
      b.set(2 * half + 1, load_shared<float>(next_row(s_row)));
    }
  }

  /// A out of the accumulators of tiles of 8 columns: its depth is columns [8 step, + 8). The matching B is
  /// load_b_transposed.
  template <int kTiles>
  __device__ __forceinline__ static void a_from_accumulators(A& a, const float (&c)[kTiles][4], int step) {
#pragma unroll
    for (int e = 0; e < 4; ++e) a.set(e, c[step][e % 2 * 2 + e / 2]);
  }

  __device__ __forceinline__ static void multiply(float (&left)[4], float (&right)[4], const A& a, const B& b) {
    multiply_tile(left, a, b, 0);
    multiply_tile(right, a, b, 2);
  }

  /// Where a lane's two neighbours in row `row` of the `tile`-th 8 columns of accumulators belong in a tile.
  __device__ __forceinline__ static uint32_t pair_at(int row, int tile, int lane) {
    return Layout::at(row, 2 * tile + lane % 4 / 2) + lane % 2 * 8;
  }
  __device__ __forceinline__ static void store_pair(uint32_t s_target, float x, float y) {
    store_shared(s_target, make_float2(x, y));
  }

 private:
  /// Matrices of 8 x 4 elements, which to ldmatrix are 8 x 8 of 16 bits.
  __device__ __forceinline__ static void load_matrices(Tf32Fragment<kCompensated>& fragment, uint32_t s_row) {
    uint32_t bits[4];
    ptx::ldmatrix_x4(bits, s_row);
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment.set(i, __uint_as_float(bits[i]));
  }

  /// From an even row of the tile, the same column of the next one: the swizzle exchanges neighbouring pieces.
  __device__ __forceinline__ static uint32_t next_row(uint32_t s_even_row) { return (s_even_row ^ 16) + kRowBytes; }

  __device__ __forceinline__ static void multiply_tile(float (&c)[4], const A& a, const B& b, int first) {
    if constexpr (kCompensated) {
      float sum[4] = {};
      ptx::mma_m16n8k8_tf32(sum, a.low, b.high[first], b.high[first + 1]);
      ptx::mma_m16n8k8_tf32(sum, a.high, b.low[first], b.low[first + 1]);
      ptx::mma_m16n8k8_tf32(sum, a.high, b.high[first], b.high[first + 1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) c[e] += sum[e];
    } else {
      ptx::mma_m16n8k8_tf32(c, a.high, b.high[first], b.high[first + 1]);
    }
  }
};

template <int kColumns>
struct Products<float, kColumns> : Tf32Products<float, kColumns> {};

template <int kColumns>
struct Products<Tf32, kColumns> : Tf32Products<Tf32, kColumns> {};

}  // namespace flash_ext::sm80
