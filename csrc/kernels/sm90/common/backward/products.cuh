// The products of the backward that a warpgroup computes for 64 keys; lower halves of descriptors name tiles.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/wgmma.h"
#include "score_tile.cuh"

namespace flash_ext::sm90 {

/// Key tiles have kKeyRows rows, of which the warpgroup takes 64.
template <class Element, int kHeadDim, int kKeyRows, int kBlockM>
struct BackwardProducts {
  using Tile = BackwardTile<Element, kBlockM>;
  using Scores = typename Tile::Scores;
  using Weights = typename Tile::Weights;
  using KeyTile = TileDescriptor<kKeyRows>;
  using QueryTile = TileDescriptor<kBlockM>;
  static constexpr int kD = kHeadDim / 8;
  using Sum = float[kD][4];

  /// Computes s = keys queries^T, of K and Q or of V and dO.
  __device__ __forceinline__ static void multiply(Scores& s, uint32_t keys, uint32_t queries) {
    start(s, keys, queries);
    finish(s);
  }
  /// Starts this product with the first 8 kColumns queries alone.
  template <int kColumns>
  __device__ __forceinline__ static void start(float (&s)[1][kColumns][4], uint32_t keys, uint32_t queries) {
    using Product = ptx::Wgmma<Element, 8 * kColumns>;
    ptx::wgmma_fence();
    Product::template multiply<false>(s[0], KeyTile::at(keys, 0), QueryTile::at(queries, 0));
#pragma unroll
    for (int step = 1; step < kHeadDim / 16; ++step)
      Product::template multiply<true>(s[0], KeyTile::at(keys, KeyTile::along_row(step)),
                                       QueryTile::at(queries, QueryTile::along_row(step)));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void finish(Scores& s) {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[0]);
  }

  /// Starts sum += weights rows, of P and dO or of dS and Q. The caller waits for it and fences the sum.
  __device__ __forceinline__ static void start_sum(Sum& sum, const Weights& weights, uint32_t rows) {
    using Product = ptx::Wgmma<Element, kHeadDim>;
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step)
      Product::template multiply_registers<true>(sum, weights[step], QueryTile::at(rows, QueryTile::down_rows(step)));
    ptx::wgmma_commit();
  }
};

}  // namespace flash_ext::sm90
