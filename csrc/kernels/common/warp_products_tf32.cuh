// Products of float tiles on tensor cores, which take TF32: 8 bits of exponent, 11 of significand.
//
// float: an element is the sum of two such numbers, x = high + low to about 2^-22, and
//
//   a b = a_high b_high + (a_high b_low + a_low b_high)            (a_low b_low is smaller than what is lost anyway)
//
// Tensor cores round their sums towards zero. Over thousands of keys this drifts by more than all other errors. So
// tensor cores add up one step alone, and the float units, which round to nearest, add its sum to C. The error is then
// no larger than that of a chain of float FMAs.
//
// Tf32: one product of elements rounded to TF32, for callers who allow that.
//
// There is no 32-bit ldmatrix.trans, so "transposed" operands are read by plain loads, in an order of the depth that
// makes accumulators an A operand as they are: of 8 rows, depth t is row 2t, depth t + 4 is row 2t + 1. Rows 0, 2, 4, 6
// lie in different banks, as do 1, 3, 5, 7. Operands along the depth keep its natural order, hence a transposed operand
// pairs with a transposed one or with accumulators only.
#pragma once

#include <type_traits>

#include "tf32.h"
#include "warp_products.cuh"

namespace flash_ext {

template <class Element, int kColumns>
struct Tf32Products {
  using Layout = TileLayout<Element, kColumns>;
  static constexpr int kDepth = 16;
  static constexpr int kRowBytes = Layout::kRowBytes;
  static constexpr bool kCompensated = std::is_same_v<Element, float>;

  /// A lane's part of 16 x 16 elements: number 4 k + i belongs to half k of the depth, and to TF32 products there as
  /// register i. They are split where they are multiplied, so that an operand that waits takes no more registers.
  struct A {
    float x[8];
  };
  /// The same; registers 0 and 1 are the left tile of 8 columns, 2 and 3 the right one.
  struct B {
    float x[8];
  };

  /// What a lane adds to a tile's address; `load_*` take the sum.
  __device__ __forceinline__ static uint32_t lane_a(int lane) { return Layout::at(lane % 16, lane / 16); }
  __device__ __forceinline__ static uint32_t lane_b(int lane) {
    return Layout::at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }
  __device__ __forceinline__ static uint32_t lane_a_transposed(int lane) {
    return Layout::at(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
  }
  __device__ __forceinline__ static uint32_t lane_b_transposed(int lane) { return lane_a_transposed(lane); }

  /// A: rows [row, row + 16) of the tile, columns [16 step, + 16). `row` is a multiple of 8.
  __device__ __forceinline__ static void load_a(A& a, uint32_t s_lane, int row, int step) {
    load(a.x, s_lane, row, step);
  }
  /// B: its columns [row, row + 16) are rows of the tile; the depth is columns [16 step, + 16).
  __device__ __forceinline__ static void load_b(B& b, uint32_t s_lane, int row, int step) {
    load(b.x, s_lane, row, step);
  }
  /// A: its rows are columns [16 pair, + 16) of the tile; the depth is rows [16 step, + 16).
  __device__ __forceinline__ static void load_a_transposed(A& a, uint32_t s_lane, int pair, int step) {
    load_transposed<1, 2>(a.x, s_lane, pair, step);
  }
  /// B: its columns are columns [16 pair, + 16) of the tile; the depth is rows [16 step, + 16).
  __device__ __forceinline__ static void load_b_transposed(B& b, uint32_t s_lane, int pair, int step) {
    load_transposed<2, 1>(b.x, s_lane, pair, step);
  }

  /// A out of the accumulators of tiles of 8 columns: its depth is columns [16 step, + 16). The matching B is
  /// load_b_transposed.
  template <int kTiles>
  __device__ __forceinline__ static void a_from_accumulators(A& a, const float (&c)[kTiles][4], int step) {
#pragma unroll
    for (int e = 0; e < 8; ++e) a.x[e] = c[2 * step + e / 4][e % 2 * 2 + e / 2 % 2];
  }

  __device__ __forceinline__ static void multiply(float (&left)[4], float (&right)[4], const A& a, const B& b) {
    if constexpr (kCompensated) {
      const Parts parts_a[2] = {round_and_split(a, 0), round_and_split(a, 1)};
      const Parts parts_b[2] = {truncate_and_split(b, 0), truncate_and_split(b, 1)};
      add_compensated<false>(left, parts_a, parts_b, 0);
      add_compensated<false>(right, parts_a, parts_b, 1);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const Operand round_a = round(a, k), round_b = round(b, k);
        add_product(left, round_a, round_b, 0);
        add_product(right, round_a, round_b, 1);
      }
    }
  }

  /// The same, with the bits of the product of B and A: operands are split, and parts added, as that product does it.
  __device__ __forceinline__ static void multiply_transposed(float (&left)[4], float (&right)[4], const A& a,
                                                             const B& b) {
    if constexpr (kCompensated) {
      const Parts parts_a[2] = {truncate_and_split(a, 0), truncate_and_split(a, 1)};
      const Parts parts_b[2] = {round_and_split(b, 0), round_and_split(b, 1)};
      add_compensated<true>(left, parts_a, parts_b, 0);
      add_compensated<true>(right, parts_a, parts_b, 1);
    } else {
      multiply(left, right, a, b);
    }
  }

  /// Where a lane's two neighbours in row `row` of the `tile`-th 8 columns of accumulators belong in a tile.
  __device__ __forceinline__ static uint32_t pair_at(int row, int tile, int lane) {
    return Layout::at(row, 2 * tile + lane % 4 / 2) + lane % 2 * 8;
  }
  __device__ __forceinline__ static void store_pair(uint32_t s_target, float x, float y) {
    store_shared(s_target, make_float2(x, y));
  }

  /// Accumulators of two tiles of 8 columns: rows [row, row + 16) and columns [16 pair, + 16) of a tile.
  __device__ __forceinline__ static uint32_t lane_c(int lane) { return pair_at(lane / 4, 0, lane); }
  __device__ __forceinline__ static void store_c(uint32_t s_lane, int row, int pair, const float (&left)[4],
                                                 const float (&right)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const uint32_t s_row = s_lane + (row + 4 * e) * kRowBytes;
      store_pair(at_step(s_row, 2 * pair), left[e], left[e + 1]);
      store_pair(at_step(s_row, 2 * pair + 1), right[e], right[e + 1]);
    }
  }
  __device__ __forceinline__ static void load_c(uint32_t s_lane, int row, int pair, float (&left)[4],
                                                float (&right)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const uint32_t s_row = s_lane + (row + 4 * e) * kRowBytes;
      const float2 of_left = load_shared<float2>(at_step(s_row, 2 * pair));
      const float2 of_right = load_shared<float2>(at_step(s_row, 2 * pair + 1));
      left[e] = of_left.x, left[e + 1] = of_left.y;
      right[e] = of_right.x, right[e + 1] = of_right.y;
    }
  }

  /// The same as an A operand, which is what a_from_accumulators makes of them.
  __device__ __forceinline__ static uint32_t lane_a_of_c(int lane) { return lane_c(lane); }
  __device__ __forceinline__ static void load_a_of_c(A& a, uint32_t s_lane, int row, int pair) {
    float c[2][4];
    load_c(s_lane, row, pair, c[0], c[1]);
    a_from_accumulators(a, c, 0);
  }

 private:
  __device__ __forceinline__ static void load(float (&x)[8], uint32_t s_lane, int row, int step) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t bits[4];
      ptx::ldmatrix_x4(bits, at_step(s_lane, 2 * step + k) + row * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * k + i] = __uint_as_float(bits[i]);
    }
  }
  /// kOfHalf, kOfRow: how far the registers of halves of the columns, and of two rows, lie apart.
  template <int kOfHalf, int kOfRow>
  __device__ __forceinline__ static void load_transposed(float (&x)[8], uint32_t s_lane, int pair, int step) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t s_row = at_step(s_lane, 2 * pair + half) + (16 * step + 8 * k) * kRowBytes;
        x[4 * k + kOfHalf * half] = load_shared<float>(s_row);
        x[4 * k + kOfHalf * half + kOfRow] = load_shared<float>(next_row(s_row));
      }
  }
  /// From an even row of the tile, the same column of the next one: the swizzle exchanges neighbouring chunks.
  __device__ __forceinline__ static uint32_t next_row(uint32_t s_even_row) { return (s_even_row ^ 16) + kRowBytes; }

  /// Four numbers for tensor cores, which do not look at the 13 low bits.
  struct Operand {
    uint32_t r[4];
  };
  struct Parts {
    Operand high, low;  // low: what high leaves
  };

  /// Splits numbers with `high` rounded to nearest, so that errors average out.
  template <class AB>
  __device__ __forceinline__ static Parts round_and_split(const AB& a, int k) {
    Parts parts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = a.x[4 * k + i];
      parts.high.r[i] = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;  // may lose a NaN: it is in `low`
      parts.low.r[i] = __float_as_uint(x - __uint_as_float(parts.high.r[i]));
    }
    return parts;
  }
  /// Splits numbers with `high` truncated: one instruction less, and no overflow. With the other operand rounded to
  /// nearest that does no harm.
  template <class AB>
  __device__ __forceinline__ static Parts truncate_and_split(const AB& b, int k) {
    Parts parts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = b.x[4 * k + i];
      parts.high.r[i] = __float_as_uint(x);
      parts.low.r[i] = __float_as_uint(x - __uint_as_float(parts.high.r[i] & 0xffffe000u));
    }
    return parts;
  }
  template <class AB>
  __device__ __forceinline__ static Operand round(const AB& ab, int k) {
    Operand operand;
#pragma unroll
    for (int i = 0; i < 4; ++i) operand.r[i] = ptx::to_tf32(ab.x[4 * k + i]);
    return operand;
  }

  __device__ __forceinline__ static void add_product(float (&c)[4], const Operand& a, const Operand& b, int tile) {
    ptx::mma_m16n8k8_tf32(c, a.r, b.r[2 * tile], b.r[2 * tile + 1]);
  }

  template <bool kTransposed>
  __device__ __forceinline__ static void add_compensated(float (&c)[4], const Parts (&a)[2], const Parts (&b)[2],
                                                         int tile) {
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (!kTransposed) add_product(sum, a[k].low, b[k].high, tile);
      add_product(sum, a[k].high, b[k].low, tile);
      if (kTransposed) add_product(sum, a[k].low, b[k].high, tile);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) add_product(sum, a[k].high, b[k].high, tile);
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e] += sum[e];
  }
};

template <int kColumns>
struct Products<float, kColumns> : Tf32Products<float, kColumns> {};

template <int kColumns>
struct Products<Tf32, kColumns> : Tf32Products<Tf32, kColumns> {};

}  // namespace flash_ext
