// Products of floats by a warpgroup: 64 x 64 sums over a piece of 64, each product of two numbers being six of their
// parts (float_parts.cuh). Pieces are named by the lower halves of their descriptors.
#pragma once

#include "../common/scores.cuh"
#include "../ptx/wgmma.h"
#include "../ptx/wgmma_registers.h"
#include "float_parts.cuh"

namespace flash_ext::sm90 {

struct FloatProducts {
  static constexpr int kSteps = kPieceRows / 16;  // along a piece
  using Tile = float[8][4];                       // 64 x 64 accumulators of a warpgroup
  using Operand = uint32_t[kParts][kSteps][4];    // what was such a tile

  /// A B^T of two pieces: s gets the largest products, rest all others, and without kFirst they are added. Under way
  /// when this returns.
  template <bool kFirst>
  __device__ __forceinline__ static void start(Tile& s, Tile& rest, uint32_t a_piece, uint32_t b_piece) {
    using Product = ptx::Wgmma<__nv_bfloat16, kPieceRows>;
    constexpr int kLast = kPartProducts - 1;
    const auto part = [](uint32_t piece, int part, int step) {
      return PieceDescriptor::at(piece, part * kPartBytes + PieceDescriptor::along_row(step));
    };
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPartProducts; ++k)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t a = part(a_piece, part_of_a(k), step), b = part(b_piece, part_of_b(k), step);
        Tile& sum = k == kLast ? s : rest;
        if (kFirst && step == 0 && (k == 0 || k == kLast)) {
          Product::template multiply<false>(sum, a, b);
        } else {
          Product::template multiply<true>(sum, a, b);
        }
      }
    ptx::wgmma_commit();
  }

  /// sum = A B, the smallest products first: A in registers, B's rows across the depth. Under way when this returns.
  __device__ __forceinline__ static void start(Tile& sum, const Operand& a, uint32_t b_piece) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPartProducts; ++k)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint64_t b = PieceDescriptor::at(b_piece, part_of_b(k) * kPartBytes + PieceDescriptor::down_rows(step));
        if (k == 0 && step == 0) {
          ptx::wgmma_registers<false>(sum, a[part_of_a(k)][step], b);
        } else {
          ptx::wgmma_registers<true>(sum, a[part_of_a(k)][step], b);
        }
      }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ static void pin(Tile& x) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(x[n][e]);
  }

  __device__ __forceinline__ static void clear(Tile& x) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
  }

  __device__ __forceinline__ static void add(Tile& x, const Tile& y) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] += y[n][e];
  }

  /// The parts of a tile, in the places of an operand.
  __device__ __forceinline__ static void pack(Operand& a, const Tile& x) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float(&pair)[4] = x[2 * step + e / 2];
        uint32_t parts[kParts];
        split(pair[e % 2 * 2], pair[e % 2 * 2 + 1], parts);
#pragma unroll
        for (int k = 0; k < kParts; ++k) a[k][step][e] = parts[k];
      }
  }
};

}  // namespace flash_ext::sm90
