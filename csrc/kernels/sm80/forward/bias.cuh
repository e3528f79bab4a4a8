// The bias as the initial value of the products, in the variants whose only option is a bias. Each warp has a bias tile
// of its own in shared memory, loaded as early as a BiasTile.
#pragma once

#include "kernels/common/score/bias_tile.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/tile.cuh"
#include "kernels/ptx/arithmetic.h"

namespace flash_ext::sm80 {

/// A bias tile of kRows queries and kKeys keys.
template <class Element, int kRows, int kKeys>
struct StartingBias {
  using Layout = TileLayout<Element, kKeys>;
  static constexpr int kBytes = Layout::bytes(kRows);
  uint32_t s_tile;  // aligned to 128 bytes
  const ScoreView& bias;
  int lane;

  /// Starts the copies of a tile without waiting. Keys from seqlen_k on and queries from seqlen_q on become 0.
  __device__ __forceinline__ void load(const Sequence& sequence, int first_query, int first_key) const {
    constexpr int kChunks = Layout::kChunks, kStep = 32 / kChunks;
    const int row = lane / kChunks, chunk = lane % kChunks, column = first_key + chunk * Layout::kChunkElements;
    const Element* const g_head =
        static_cast<const Element*>(bias.data) + sequence.batch * bias.batch_stride + sequence.head * bias.head_stride;
    const Element* g_chunk = g_head + (first_query + row) * bias.row_stride + column;
    const uint32_t s_first = s_tile + Layout::at(row, chunk);
    const int64_t step = kStep * bias.row_stride;
    const auto s_row = [&](int k) {
      return (s_first ^ (static_cast<uint32_t>((k * kStep) & 7) << 4)) + k * kStep * Layout::kRowBytes;
    };
    // Where the bias is the same for all queries, its row is read once. If all CTAs asked L2 for it once for each row
    // of the tile, that would take four times as long.
    if (bias.row_stride == 0 && first_key + kKeys <= sequence.seqlen_k) {
      const uint4 of_all = __ldg(reinterpret_cast<const uint4*>(g_chunk));
#pragma unroll
      for (int k = 0; k < kRows / kStep; ++k) store_shared(s_row(k), of_all);
      return;
    }
    if (first_query + kRows <= sequence.seqlen_q && first_key + kKeys <= sequence.seqlen_k) {
#pragma unroll 8
      for (int k = 0; k < kRows / kStep; ++k, g_chunk += step) ptx::cp_async_16(s_row(k), g_chunk);
      return;
    }
    const int bytes = min(max(sequence.seqlen_k - column, 0) * static_cast<int>(sizeof(Element)), 16);
    const int valid_rows = bytes == 0 ? 0 : sequence.seqlen_q - first_query - row;
#pragma unroll 1
    for (int k = 0; k < kRows / kStep; ++k, g_chunk += step) {
      const bool valid = k * kStep < valid_rows;
      ptx::cp_async_16_of(s_row(k), valid ? g_chunk : g_head, valid ? bytes : 0);
    }
  }

  /// s = factor * b. It is one stretch of code, so that products that start from s begin before all of s is there.
  template <int kM, int kN>
  __device__ __forceinline__ void fill(float (&s)[kM][kN][4], float factor) const {
    for_each(s, [&](float& x, float b) { x = b * factor; });
  }

  /// Applies saturate_tile().
  __device__ __forceinline__ void saturate(float most) const { saturate_tile<Element>(s_tile, kBytes, most, lane); }

  /// Zeroes weights that the bias hides by -inf, even if they are NaN, as scores of hidden keys may be.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&p)[kM][kN][4]) const {
    for_each(p, [](float& x, float b) { x = b == -INFINITY ? 0.0f : x; });
  }

 private:
  /// Calls f(x, b) for every accumulator and its bias.
  template <int kM, int kN, class F>
  __device__ __forceinline__ void for_each(float (&s)[kM][kN][4], F f) const {
    if constexpr (sizeof(Element) == 4) {
      for_each_by_pairs(s, f);
    } else {
      const auto unpack = [](uint32_t pair) { return ptx::unpack2<Element>(pair); };
      for_each_by_ldmatrix<Layout>(s, s_tile, lane, unpack, f);
    }
  }

  template <int kM, int kN, class F>
  __device__ __forceinline__ void for_each_by_pairs(float (&s)[kM][kN][4], F f) const {
    const uint32_t s_lane = s_tile + Layout::at(lane / 4, lane % 4 / 2) + lane % 2 * 8;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n % 2 == 0) __syncwarp();  // or ptxas loads more ahead than it has registers for
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 b = load_shared<float2>(at_step(s_lane, n) + (16 * m + 8 * r) * Layout::kRowBytes);
          f(s[m][n][2 * r], b.x);
          f(s[m][n][2 * r + 1], b.y);
        }
    }
  }
};

}  // namespace flash_ext::sm80
