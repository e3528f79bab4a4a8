// Tiles in shared memory: rows of kColumns elements in 16-byte chunks. ldmatrix reads eight rows of one column of
// chunks at once; the swizzle puts these in eight different groups of banks.
//
// The swizzle permutes chunks within 128 bytes, by the last three bits of the row. So a lane computes its address once,
// and a step of 32 bytes along the row is one XOR and one addition: at_step().
#pragma once

#include <cstdint>

#include "kernels/ptx/cp_async.h"
#include "kernels/ptx/ldmatrix.h"

namespace flash_ext {

/// kColumns elements a row; rows are padded to a multiple of 128 bytes, over which the swizzle reaches.
template <class Element, int kColumns>
struct TileLayout {
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kChunks = kColumns / kChunkElements;  // that hold elements
  static constexpr int kRowBytes = (kColumns * static_cast<int>(sizeof(Element)) + 127) / 128 * 128;
  static_assert(kColumns % kChunkElements == 0, "rows are made of whole chunks");

  static constexpr int bytes(int rows) { return rows * kRowBytes; }

  /// Byte offset of a chunk.
  __device__ __forceinline__ static uint32_t at(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes + (((chunk & ~7) | ((chunk ^ row) & 7)) << 4));
  }
};

/// The address `step` * 32 bytes further along the row, from a lane's address in the row's first 32 bytes. Tiles are
/// aligned to 128 bytes.
__device__ __forceinline__ uint32_t at_step(uint32_t s_lane, int step) {
  return (s_lane ^ static_cast<uint32_t>((step & 3) << 5)) + static_cast<uint32_t>(step >> 2) * 128;
}

/// Calls f(x, element) for every accumulator of a warp and its element of a tile of 16 bits: ldmatrix deals elements
/// out as accumulators lie. `unpack` makes floats of two elements.
template <class Layout, int kM, int kN, class Unpack, class F>
__device__ __forceinline__ void for_each_by_ldmatrix(float (&s)[kM][kN][4], uint32_t s_tile, int lane, Unpack unpack,
                                                     F f) {
  const uint32_t s_lane = s_tile + Layout::at(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < kN; n += 2)
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4(pairs, at_step(s_lane, n / 2) + 16 * m * Layout::kRowBytes);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 element = unpack(pairs[e]);
        f(s[m][n + e / 2][e % 2 * 2], element.x);
        f(s[m][n + e / 2][e % 2 * 2 + 1], element.y);
      }
    }
}

/// Starts the copies of rows [first, first + kRows) of a sequence, by kThreads threads, and does not wait for them.
/// Elements outside of (num_rows, columns) become 0; columns is a multiple of 8.
template <class Element, int kColumns, int kThreads, int kRows, class Rows>
__device__ __forceinline__ void load_tile(uint32_t s_tile, const Rows& rows, int first, int num_rows, int columns,
                                          int thread = static_cast<int>(threadIdx.x)) {
  using Layout = TileLayout<Element, kColumns>;
  constexpr int kChunks = Layout::kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0, "threads share the chunks evenly");
  constexpr int kStep = kThreads / kChunks;
  const int chunk = thread % kChunks, thread_row = thread / kChunks;
  const int column = Layout::kChunkElements * chunk;
  // Nearly all tiles: no bounds to look at, and one addition a row.
  if (rows.evenly_spaced() && first + kRows <= num_rows && columns == kColumns) {
    auto* g_chunk = rows.base + (first + thread_row) * rows.row_stride + column;
    const int64_t step = kStep * rows.row_stride;
    const uint32_t s_first = s_tile + Layout::at(thread_row, chunk);
    static_assert(kStep % 8 == 0 || 8 % kStep == 0, "rows that follow differ in bits that the first row has not");
#pragma unroll
    for (int k = 0; k < kRows / kStep; ++k, g_chunk += step) {
      const uint32_t swizzle = static_cast<uint32_t>((k * kStep) & 7) << 4;
      ptx::cp_async_16((s_first ^ swizzle) + k * kStep * Layout::kRowBytes, g_chunk);
    }
    return;
  }
  const int valid_rows = column < columns ? num_rows - first - thread_row : 0;
#pragma unroll 1
  for (int k = 0; k < kRows / kStep; ++k) {
    const bool valid = k * kStep < valid_rows;
    ptx::cp_async_16(s_tile + Layout::at(thread_row + k * kStep, chunk),
                     rows.row(valid ? first + thread_row + k * kStep : 0) + (valid ? column : 0), valid);
  }
}

template <class T>
__device__ __forceinline__ void store_shared(uint32_t s_target, T value) {
  *static_cast<T*>(__cvta_shared_to_generic(s_target)) = value;
}

template <class T>
__device__ __forceinline__ T load_shared(uint32_t s_source) {
  return *static_cast<const T*>(__cvta_shared_to_generic(s_source));
}

/// Stores rows [first, first + count) of a tile to global memory, row r of the tile to row first_row + r, by one warp.
template <class Element, int kColumns, class Rows>
__device__ __forceinline__ void store_rows(uint32_t s_tile, const Rows& rows, int first, int count, int first_row,
                                           int num_rows, int columns, int lane) {
  using Layout = TileLayout<Element, kColumns>;
  for (int k = lane; k < count * Layout::kChunks; k += 32) {
    const int row = first + k / Layout::kChunks, chunk = k % Layout::kChunks;
    if (first_row + row >= num_rows || Layout::kChunkElements * chunk >= columns) continue;
    const uint4 value = load_shared<uint4>(s_tile + Layout::at(row, chunk));
    *reinterpret_cast<uint4*>(rows.row(first_row + row) + Layout::kChunkElements * chunk) = value;
  }
}

}  // namespace flash_ext
