// Products of float matrices by a warpgroup. A result has 64 rows and the columns of a subtile; it sums over the depth
// of a subtile. Each product of two floats is six products of their parts (float_parts.cuh). Subtiles are named by the
// lower halves of their descriptors.
#pragma once

#include "float_parts.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/wgmma.h"

namespace flash_ext::sm90 {

/// Products with B in subtiles of kSide rows and columns.
template <int kSide>
struct FloatProductsOf {
  static constexpr int kSteps = kSide / 16;  // along a subtile
  static constexpr int kEights = kSide / 8;
  using Tile = float[kEights][4];                    // 64 x kSide accumulators of a warpgroup
  using Operand = uint32_t[kFloatParts][kSteps][4];  // the parts of such a tile
  using Descriptor = DescriptorOfSubtile<kSide>;

  /// Starts A B^T of two subtiles, or of kColumns of their columns: s gets the largest products, rest all others.
  /// Without kFirst they are added to s, without kFirstOfRest to rest. The products are in flight when this returns.
  /// kTransposed: sums in the order of B A^T, to the same bits.
  template <bool kFirst, bool kTransposed = false, int kColumns = kSide, bool kFirstOfRest = kFirst>
  __device__ __forceinline__ static void start(Tile& s, Tile& rest, uint32_t a_subtile, uint32_t b_subtile) {
    static_assert(kSide == kSubtileRows);
    using Product = ptx::Wgmma<__nv_bfloat16, kSubtileRows>;
    constexpr int kLast = kPartProducts - 1;
    const auto of_a = [](int k) { return kTransposed ? part_of_b(k) : part_of_a(k); };
    const auto of_b = [](int k) { return kTransposed ? part_of_a(k) : part_of_b(k); };
    const auto part = [](uint32_t subtile, int part, int step) {
      return SubtileDescriptor::at(subtile, part * kPartBytes + SubtileDescriptor::along_row(step));
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPartProducts; ++k)
#pragma unroll
      for (int step = 0; step < kColumns / 16; ++step) {
        const uint64_t a = part(a_subtile, of_a(k), step), b = part(b_subtile, of_b(k), step);
        Tile& sum = k == kLast ? s : rest;
        if (step == 0 && ((kFirstOfRest && k == 0) || (kFirst && k == kLast))) {
          Product::template multiply<false>(sum, a, b);
        } else {
          Product::template multiply<true>(sum, a, b);
        }
      }
    ptx::wgmma_commit();
  }

  /// The sums of a product with few rows of B. No sum lies in a part of another one's registers, because then ptxas
  /// would make each product wait for the one before.
  struct PairedSums {
    Tile largest;                 // a0 b0
    float pairs[2 * kEights][4];  // first half: a0 b1 + a1 b0; second half: a0 b2 + a1 b1
    Tile last;                    // a2 b0

    __device__ __forceinline__ void fence_operand() {
      ptx::fence_operand(largest);
      ptx::fence_operand(pairs);
      ptx::fence_operand(last);
    }
    __device__ __forceinline__ void add_up(Tile& s) const {
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = largest[n][e] + (pairs[n][e] + (pairs[kEights + n][e] + last[n][e]));
    }
  };

  /// Starts A B^T, where A is kSide columns of a subtile of 64 rows. Where possible, two parts of B, which lie one
  /// after the other, are multiplied at a time: six reads of the 64 rows of A would take longer than the products with
  /// 32 rows of B. The products are in flight when this returns.
  template <bool kFirst>
  __device__ __forceinline__ static void start(PairedSums& sums, uint32_t a_columns, uint32_t b_subtile) {
    using Product = ptx::Wgmma<__nv_bfloat16, kSide>;
    using PairProduct = ptx::Wgmma<__nv_bfloat16, 2 * kSide>;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto a = [&](int k) {
        return SubtileDescriptor::at(a_columns, k * kPartBytes + SubtileDescriptor::along_row(step));
      };
      const auto b = [&](int k) {
        return Descriptor::at(b_subtile, k * FloatSubtile<kSide>::kPartBytes + Descriptor::along_row(step));
      };
      if (kFirst && step == 0) {
        Product::template multiply<false>(sums.last, a(2), b(0));
        PairProduct::template multiply<false>(sums.pairs, a(1), b(0));
        PairProduct::template multiply<true>(sums.pairs, a(0), b(1));
        Product::template multiply<false>(sums.largest, a(0), b(0));
      } else {
        Product::template multiply<true>(sums.last, a(2), b(0));
        PairProduct::template multiply<true>(sums.pairs, a(1), b(0));
        PairProduct::template multiply<true>(sums.pairs, a(0), b(1));
        Product::template multiply<true>(sums.largest, a(0), b(0));
      }
    }
    ptx::wgmma_commit();
  }

  /// Starts sum = A B, the smallest products first. A is in registers; of B, which is MN-major, it takes
  /// 8 kN columns. The products are in flight when this returns.
  template <int kN>
  __device__ __forceinline__ static void start(float (&sum)[kN][4], const Operand& a, uint32_t b_subtile) {
    using Product = ptx::Wgmma<__nv_bfloat16, 8 * kN>;
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPartProducts; ++k)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t b =
            Descriptor::at(b_subtile, part_of_b(k) * FloatSubtile<kSide>::kPartBytes + Descriptor::down_rows(step));
        if (k == 0 && step == 0) {
          Product::template multiply_registers<false>(sum, a[part_of_a(k)][step], b);
        } else {
          Product::template multiply_registers<true>(sum, a[part_of_a(k)][step], b);
        }
      }
    ptx::wgmma_commit();
  }

  template <int kN>
  __device__ __forceinline__ static void add(float (&x)[kN][4], const float (&y)[kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] += y[n][e];
  }

  /// Splits a tile into parts, in the order of an operand.
  __device__ __forceinline__ static void pack(Operand& a, const Tile& x) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&pair)[4] = x[2 * step + e / 2];
        uint32_t parts[kFloatParts];
        split(pair[e % 2 * 2], pair[e % 2 * 2 + 1], parts);
#pragma unroll
        for (int k = 0; k < kFloatParts; ++k) a[k][step][e] = parts[k];
      }
  }
};

using FloatProducts = FloatProductsOf<kSubtileRows>;

}  // namespace flash_ext::sm90
