// A tile of the bias in shared memory, brought there by cp.async beside the tile of values: reading it element by
// element from global memory would cost several times what the whole tile of attention does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/scores.cuh"
#include "tile.cuh"

namespace flash_ext::sm80 {

inline int64_t bias_element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

/// Whether tiles can be copied in pieces of 16 bytes, of elements of 2 or 4.
inline bool can_stage_bias(const ScoreView& bias) {
  if (!bias.data || bias.dtype == DType::kFloat64 || bias.col_stride != 1) return false;
  const int64_t piece = 16 / bias_element_bytes(bias.dtype);
  const int64_t strides[] = {bias.batch_stride, bias.head_stride, bias.row_stride};
  bool aligned = reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
  for (const int64_t stride : strides) aligned = aligned && stride % piece == 0;
  return aligned;
}

/// kRows queries and kKeys keys.
template <int kThreads, int kRows, int kKeys>
struct BiasTile {
  uint32_t s_tile;  // aligned to 128 bytes
  const ScoreView& bias;

  static int64_t bytes(const ScoreView& bias) {
    return bias.dtype == DType::kFloat32 ? TileLayout<float, kKeys>::bytes(kRows)
                                         : TileLayout<uint16_t, kKeys>::bytes(kRows);
  }

  /// Without waiting. Keys from seqlen_k on and queries from seqlen_q on become 0.
  __device__ __forceinline__ void load(const Sequence& sequence, int first_query, int first_key) const {
    bias.dtype == DType::kFloat32 ? load_as<float>(sequence, first_query, first_key)
                                  : load_as<uint16_t>(sequence, first_query, first_key);
  }

  /// Adds the bias to base-2 scores: x + b, or -inf where b hides the score, even one that is NaN. `row` and `column`
  /// are where the lane's accumulators begin in the tile.
  template <int kM, int kN>
  __device__ __forceinline__ void add(float (&s)[kM][kN][4], int row, int column) const {
    switch (bias.dtype) {
      case DType::kFloat16:
        return add_as<__half2>(s, row, column);
      case DType::kBFloat16:
        return add_as<__nv_bfloat162>(s, row, column);
      default:
        return add_as<float2>(s, row, column);
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ void load_as(const Sequence& sequence, int first_query, int first_key) const {
    using Layout = TileLayout<T, kKeys>;
    constexpr int kPieces = Layout::kPieces, kStep = kThreads / kPieces;
    const int piece = threadIdx.x % kPieces, column = first_key + piece * Layout::kPieceElements;
    const int bytes = min(max(sequence.seqlen_k - column, 0) * static_cast<int>(sizeof(T)), 16);
    const T* const g_head =
        static_cast<const T*>(bias.data) + sequence.batch * bias.batch_stride + sequence.head * bias.head_stride;
#pragma unroll 4
    for (int row = threadIdx.x / kPieces; row < kRows; row += kStep) {
      const bool valid = bytes > 0 && first_query + row < sequence.seqlen_q;
      const T* const g_piece = valid ? g_head + (first_query + row) * bias.row_stride + column : g_head;
      ptx::cp_async_16_of(s_tile + Layout::at(row, piece), g_piece, valid ? bytes : 0);
    }
  }

  __device__ __forceinline__ static float2 to_floats(__half2 x) { return __half22float2(x); }
  __device__ __forceinline__ static float2 to_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }
  __device__ __forceinline__ static float2 to_floats(float2 x) { return x; }

  template <class Pair, int kM, int kN>
  __device__ __forceinline__ void add_as(float (&s)[kM][kN][4], int row, int column) const {
    using T = std::conditional_t<sizeof(Pair) == 8, float, uint16_t>;
    using Layout = TileLayout<T, kKeys>;
    constexpr int kPiecesPerTile = 8 / Layout::kPieceElements;  // of 8 columns
    const uint32_t s_lane = s_tile + Layout::at(row, column / Layout::kPieceElements) +
                            column % Layout::kPieceElements * static_cast<int>(sizeof(T));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint32_t piece = kPiecesPerTile * n;
      const uint32_t s_column = (s_lane ^ ((piece & 7) << 4)) + (piece >> 3) * 128;
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float2 b = to_floats(load_shared<Pair>(s_column + (16 * m + 8 * r) * Layout::kRowBytes));
          add_to(s[m][n][2 * r], b.x);
          add_to(s[m][n][2 * r + 1], b.y);
        }
    }
  }

  __device__ __forceinline__ static void add_to(float& x, float b) {
    x = b == -INFINITY ? -INFINITY : fmaf(b, kLog2E, x);
  }
};

}  // namespace flash_ext::sm80
