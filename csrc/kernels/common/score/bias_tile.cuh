// A warp's bias tile in shared memory, loaded by cp.async while the tile before is multiplied. To read the bias element
// by element from global memory would cost several times what the whole tile of attention does. No other warp reads
// the tile, so a warp waits only for its own copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bias_view.h"
#include "kernels/common/tile.cuh"
#include "kernels/ptx/ldmatrix.h"
#include "scores.cuh"

namespace flash_ext {

/// Applies saturate_bias() to all elements of a warp's tile in shared memory, which has `bytes` bytes. Slow: only for
/// rows that are recomputed.
template <class T>
__device__ __forceinline__ void saturate_tile(uint32_t s_tile, int bytes, float most, int lane) {
#pragma unroll 1
  for (int at = 4 * lane; at < bytes; at += 4 * 32) {
    if constexpr (sizeof(T) == 4) {
      store_shared(s_tile + at, saturate_bias(load_shared<float>(s_tile + at), most));
    } else {
      const float2 pair = ptx::unpack2<T>(load_shared<uint32_t>(s_tile + at));
      store_shared(s_tile + at, ptx::pack2<T>(saturate_bias(pair.x, most), saturate_bias(pair.y, most)));
    }
  }
  __syncwarp();
}

/// A tile of kRows queries and kKeys keys. Where the bias is the same for every query, its first row stands for all.
template <int kRows, int kKeys>
struct BiasTile {
  uint32_t s_tile;  // aligned to 128 bytes
  const ScoreView& bias;
  int lane;

  static constexpr int kBytes16 = TileLayout<uint16_t, kKeys>::bytes(kRows);
  static constexpr int kBytes32 = TileLayout<float, kKeys>::bytes(kRows);
  static int64_t bytes(const ScoreView& bias) { return bias.dtype == DType::kFloat32 ? kBytes32 : kBytes16; }

  /// Starts the copies of a tile without waiting. Keys from seqlen_k on and queries from seqlen_q on become 0.
  __device__ __forceinline__ void load(const Sequence& sequence, int first_query, int first_key) const {
    bias.dtype == DType::kFloat32 ? load_as<float>(sequence, first_query, first_key)
                                  : load_as<uint16_t>(sequence, first_query, first_key);
  }

  /// s + factor * b
  template <int kM, int kN>
  __device__ __forceinline__ void add(float (&s)[kM][kN][4], float factor) const {
    for_each(s, [&](float& x, float b) { x = fmaf(b, factor, x); });
  }

  /// Applies saturate_tile(). float16 has no number that is too large.
  __device__ __forceinline__ void saturate(float most) const {
    if (bias.dtype == DType::kFloat32) saturate_tile<float>(s_tile, kBytes32, most, lane);
    if (bias.dtype == DType::kBFloat16) saturate_tile<__nv_bfloat16>(s_tile, kBytes16, most, lane);
  }

  /// Zeroes weights that the bias hides by -inf, even if they are NaN, as scores of hidden keys may be.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&p)[kM][kN][4]) const {
    for_each(p, [](float& x, float b) { x = b == -INFINITY ? 0.0f : x; });
  }

 private:
  template <class T>
  __device__ __forceinline__ void load_as(const Sequence& sequence, int first_query, int first_key) const {
    using Layout = TileLayout<T, kKeys>;
    constexpr int kChunks = Layout::kChunks, kStep = 32 / kChunks;
    const int first_row = lane / kChunks, chunk = lane % kChunks, column = first_key + chunk * Layout::kChunkElements;
    const int bytes = min(max(sequence.seqlen_k - column, 0) * static_cast<int>(sizeof(T)), 16);
    const int rows = bias.row_stride == 0 ? 1 : min(sequence.seqlen_q - first_query, kRows);
    const T* const g_head =
        static_cast<const T*>(bias.data) + sequence.batch * bias.batch_stride + sequence.head * bias.head_stride;
    const T* g_chunk = g_head + (first_query + first_row) * bias.row_stride + column;
    const uint32_t s_first = s_tile + Layout::at(first_row, chunk);
    const int64_t step = kStep * bias.row_stride;
    const auto s_row = [&](int k) {
      return (s_first ^ (static_cast<uint32_t>((k * kStep) & 7) << 4)) + k * kStep * Layout::kRowBytes;
    };
    if (rows == kRows && first_key + kKeys <= sequence.seqlen_k) {  // nearly always
#pragma unroll
      for (int k = 0; k < kRows / kStep; ++k, g_chunk += step) ptx::cp_async_16(s_row(k), g_chunk);
      return;
    }
#pragma unroll 1
    for (int k = 0; k < kRows / kStep; ++k, g_chunk += step) {
      const bool valid = bytes > 0 && first_row + k * kStep < rows;
      ptx::cp_async_16_of(s_row(k), valid ? g_chunk : g_head, valid ? bytes : 0);
      if (bias.row_stride == 0) return;
    }
  }

  __device__ __forceinline__ static float2 to_floats(__half2 x) { return __half22float2(x); }
  __device__ __forceinline__ static float2 to_floats(__nv_bfloat162 x) {
    return ptx::unpack2<__nv_bfloat16>(reinterpret_cast<const uint32_t&>(x));
  }
  __device__ __forceinline__ static float2 to_floats(float2 x) { return x; }

  /// Calls f(x, b) for every accumulator and its bias.
  template <int kM, int kN, class F>
  __device__ __forceinline__ void for_each(float (&s)[kM][kN][4], F f) const {
    switch (bias.dtype) {
      case DType::kFloat16:
        return for_each_of<__half2>(s, f);
      case DType::kBFloat16:
        return for_each_of<__nv_bfloat162>(s, f);
      default:
        return for_each_of<float2>(s, f);
    }
  }

  template <class Pair, int kM, int kN, class F>
  __device__ __forceinline__ void for_each_of(float (&s)[kM][kN][4], F f) const {
    if (bias.row_stride == 0) return for_each_column<Pair>(s, f);
    if constexpr (sizeof(Pair) == 4) {
      for_each_by_matrices<Pair>(s, f);
    } else {
      for_each_by_pairs<Pair>(s, f);
    }
  }

  template <class T>
  __device__ __forceinline__ uint32_t pair_at(uint32_t s_lane, int n) const {
    constexpr int kChunksPerTile = 8 / TileLayout<T, kKeys>::kChunkElements;  // of 8 columns
    const uint32_t chunk = kChunksPerTile * n;
    return (s_lane ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128;
  }
  template <class T>
  __device__ __forceinline__ uint32_t lane_at(int row) const {
    using Layout = TileLayout<T, kKeys>;
    const int column = 2 * (lane % 4);
    return s_tile + Layout::at(row, column / Layout::kChunkElements) +
           column % Layout::kChunkElements * static_cast<int>(sizeof(T));
  }

  template <class Pair, int kM, int kN, class F>
  __device__ __forceinline__ void for_each_column(float (&s)[kM][kN][4], F f) const {
    using T = std::conditional_t<sizeof(Pair) == 8, float, uint16_t>;
    const uint32_t s_lane = lane_at<T>(0);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 b = to_floats(load_shared<Pair>(pair_at<T>(s_lane, n)));
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(s[m][n][e], e % 2 ? b.y : b.x);
    }
  }

  template <class Pair, int kM, int kN, class F>
  __device__ __forceinline__ void for_each_by_pairs(float (&s)[kM][kN][4], F f) const {
    using T = std::conditional_t<sizeof(Pair) == 8, float, uint16_t>;
    const uint32_t s_lane = lane_at<T>(lane / 4);
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 b =
              to_floats(load_shared<Pair>(pair_at<T>(s_lane, n) + (16 * m + 8 * r) * TileLayout<T, kKeys>::kRowBytes));
          f(s[m][n][2 * r], b.x);
          f(s[m][n][2 * r + 1], b.y);
        }
  }

  template <class Pair, int kM, int kN, class F>
  __device__ __forceinline__ void for_each_by_matrices(float (&s)[kM][kN][4], F f) const {
    const auto unpack = [](uint32_t pair) { return to_floats(reinterpret_cast<const Pair&>(pair)); };
    for_each_by_ldmatrix<TileLayout<uint16_t, kKeys>>(s, s_tile, lane, unpack, f);
  }
};

}  // namespace flash_ext
