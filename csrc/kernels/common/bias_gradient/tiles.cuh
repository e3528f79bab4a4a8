// How dbias is cut into tiles, which tiles of scores fall on each, and where the finished sums go.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/common/scheduler/work_order.h"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/arithmetic.h"
#include "shape.h"

namespace flash_ext {

/// What a CTA computes at a time: a tile of dbias and of scores, by warps of kM x kN accumulators.
template <class Element>
struct BiasShape {
  static constexpr bool kFloat = sizeof(Element) == 4;
  static constexpr BiasTileShape kShape = bias_tile_shape(kFloat);
  static constexpr int kRows = kShape.rows, kKeys = kShape.keys;
  static constexpr int kWarpRows = kShape.warp_rows, kWarpKeys = kShape.warp_keys;
  static constexpr int kM = kWarpRows / 16, kN = kWarpKeys / 8;
  static constexpr int kKeyWarps = kShape.key_warps();
  static constexpr int kThreads = 32 * kShape.warps();
  static constexpr int kCtasPerSm = kBiasCtasPerSm;
};

/// How dbias is cut into tiles, and the sum of a tile into chunks. The number of chunks determines the order of the
/// sum. It depends on the shapes alone, for packed sequences on their number and rows.
struct BiasTiles {
  static constexpr int64_t kMaxChunks = 65535;  // of gridDim.y

  int rows, keys;                              // of a tile
  int batches, heads, query_tiles, key_tiles;  // of dbias
  int sum_batches, sum_heads;                  // batch entries and heads that a tile of dbias sums over
  bool sums_queries, sums_keys;                // whether it sums over all queries, over all keys
  int64_t chunks;

  BiasTiles(const BackwardParams& p, int rows, int keys, int64_t wanted_blocks) : rows(rows), keys(keys) {
    const auto count_tiles = [](int64_t stride, int64_t size, int& tiles, int& summed) {
      tiles = static_cast<int>(stride == 0 ? 1 : size);
      summed = static_cast<int>(stride == 0 ? size : 1);
    };
    count_tiles(p.dbias.batch_stride, p.batch, batches, sum_batches);
    count_tiles(p.dbias.head_stride, p.heads_q, heads, sum_heads);
    sums_queries = p.dbias.row_stride == 0, sums_keys = p.dbias.col_stride == 0;
    query_tiles = static_cast<int>(sums_queries ? 1 : tiles_of_rows(p.seqlen_q, rows));
    key_tiles = static_cast<int>(sums_keys ? 1 : tiles_of_rows(p.seqlen_k, keys));
    // Packed sequences count with their mean length: max_seqlen is only a bound, and must not change any bit of the
    // sum.
    const auto length = [&](const int32_t* cu_seqlens, int64_t longest, int64_t total) {
      return cu_seqlens ? tiles_of_rows(total, std::max<int64_t>(1, p.batch)) : longest;
    };
    int64_t summed = int64_t{sum_batches} * sum_heads;
    if (sums_queries) summed *= tiles_of_rows(length(p.seq.cu_seqlens_q, p.seqlen_q, p.total_q), rows);
    if (sums_keys) summed *= tiles_of_rows(length(p.seq.cu_seqlens_k, p.seqlen_k, p.total_k), keys);
    const int64_t wanted = wanted_blocks / std::max<int64_t>(1, count());
    chunks = std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(summed, 1, kMaxChunks));
  }
  template <class Element>
  static BiasTiles of(const BackwardParams& p) {
    constexpr int64_t kWantedBlocks = 512;
    return BiasTiles(p, BiasShape<Element>::kRows, BiasShape<Element>::kKeys, kWantedBlocks);
  }

  FLASH_EXT_HOST_DEVICE int64_t count() const { return int64_t{batches} * heads * query_tiles * key_tiles; }
  FLASH_EXT_HOST_DEVICE int64_t tile_elements() const { return int64_t{rows} * keys; }
};

struct BiasWorkspace {
  float* delta = nullptr;   // (heads_q, rows of q in memory)
  float* shares = nullptr;  // (chunks, tiles, rows x keys of a tile)
  int64_t bytes = 0;

  BiasWorkspace(const BackwardParams& p, const BiasTiles& tiles, void* memory) {
    if (!p.grad_weights.data) delta = take(memory, p.heads_q * rows_of_head(p));
    if (tiles.chunks > 1) shares = take(memory, tiles.chunks * tiles.count() * tiles.tile_elements());
  }

 private:
  float* take(void* memory, int64_t count) {
    float* const taken = reinterpret_cast<float*>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(float)) + 255) / 256 * 256;
    return taken;
  }
};

/// A tile of dbias, or of scores.
struct DbiasTile {
  int key, query, head, batch;

  /// Tile number n of a grid with that many tiles along each dimension, keys innermost.
  template <class Integer>
  __device__ __forceinline__ DbiasTile(Integer n, int key_tiles, int query_tiles, int heads) {
    key = static_cast<int>(n % key_tiles);
    query = static_cast<int>(n / key_tiles % query_tiles);
    head = static_cast<int>(n / key_tiles / query_tiles % heads);
    batch = static_cast<int>(n / key_tiles / query_tiles / heads);
  }
  __device__ __forceinline__ DbiasTile(const BiasTiles& tiles, int64_t n)
      : DbiasTile(n, tiles.key_tiles, tiles.query_tiles, tiles.heads) {}
};

/// The score tiles of one chunk that fall on a tile of dbias, one after the other. A sequence has the tiles within its
/// lengths. All chunks have the same number of sequences. Where that is not a whole number, a chunk has a share of the
/// lines of its first and of its last sequence. A line is a tile of queries with all tiles of keys or, where queries
/// are not summed, one tile of keys.
struct ScoreTiles {
  DbiasTile first;
  int batch, head = 0, query = 0, key = 0;  // of the current score tile, counted from `first`
  int query_tiles = 0, key_tiles = 0;       // of the current sequence
  uint32_t lines = 0;                       // of the current sequence that are left; 0: no score tile is left

  __device__ __forceinline__ ScoreTiles(const BackwardParams& p, const BiasTiles& tiles, const DbiasTile& first,
                                        uint32_t chunk)
      : first(first), batch(static_cast<int>(tiles.sum_batches * chunk / static_cast<uint32_t>(tiles.chunks))) {
    find_sequence(p, tiles, chunk);
  }

  __device__ __forceinline__ bool any() const { return lines > 0; }
  __device__ __forceinline__ int key_tile() const { return first.key + key; }
  __device__ __forceinline__ int query_tile() const { return first.query + query; }
  __device__ __forceinline__ int head_q() const { return first.head + head; }
  __device__ __forceinline__ int entry() const { return first.batch + batch; }

  __device__ __forceinline__ void next(const BackwardParams& p, const BiasTiles& tiles, uint32_t chunk) {
    if (tiles.sums_queries) {
      if (++key < key_tiles) return;
      key = 0;
      if (++query == query_tiles) query = 0, ++head;
    } else if (++key == key_tiles) {
      key = 0, ++head;
    }
    if (--lines > 0) return;
    ++batch;
    find_sequence(p, tiles, chunk);
  }

 private:
  /// Moves on to the first sequence, from the current one on, that has lines of the chunk, if there is one.
  __device__ __forceinline__ void find_sequence(const BackwardParams& p, const BiasTiles& tiles, uint32_t chunk) {
    const uint32_t chunks = static_cast<uint32_t>(tiles.chunks);
    // Both count parts, of which a sequence has `chunks`. They are below 2^32, as there are fewer than 2^16 chunks and
    // sequences.
    const uint32_t begin = tiles.sum_batches * chunk, end = begin + tiles.sum_batches;
    for (; batch * chunks < end; ++batch) {
      const Sequence sequence(p, entry(), 0);
      query_tiles = tiles.sums_queries ? (sequence.seqlen_q + tiles.rows - 1) / tiles.rows
                                       : first.query * tiles.rows < sequence.seqlen_q;
      key_tiles = tiles.sums_keys ? (sequence.seqlen_k + tiles.keys - 1) / tiles.keys
                                  : first.key * tiles.keys < sequence.seqlen_k;
      if (query_tiles == 0 || key_tiles == 0) continue;
      const uint32_t of_head = tiles.sums_queries ? query_tiles : key_tiles, all = tiles.sum_heads * of_head;
      const uint32_t before = batch * chunks;
      const uint32_t at = begin > before ? share(all, begin - before, chunks) : 0;
      lines = (end - before < chunks ? share(all, end - before, chunks) : all) - at;
      if (lines == 0) continue;
      head = static_cast<int>(at / of_head);
      (tiles.sums_queries ? query : key) = static_cast<int>(at % of_head);
      return;
    }
    lines = 0;
  }

  /// all * part / parts, without a division of 64 bits. There are fewer than 2^16 parts.
  __device__ __forceinline__ static uint32_t share(uint32_t all, uint32_t part, uint32_t parts) {
    return all / parts * part + all % parts * part / parts;
  }
};

/// A finished tile in shared memory, which kThreads threads sum up and store.
template <int kRows, int kKeys, int kThreads>
struct BiasSum {
  static constexpr int kBytes = kRows * kKeys * 4;
  static constexpr int kColumns = 8;  // of a row, stored at once

  float* s_sum;

  /// The index of an element. It is swizzled so that two neighbours of every row that accumulators hold, and 8 of some
  /// rows, lie in different banks.
  __device__ __forceinline__ static int at(int row, int column) { return row * kKeys + (column ^ (row % 4 * 8)); }

  /// Sums over rows, columns or both into the first row, column or element. All threads call it; it begins and ends
  /// with a barrier.
  __device__ __forceinline__ void sum_broadcast(bool over_rows, bool over_columns) const {
    __syncthreads();
    if (over_rows) {
      for (int column = threadIdx.x; column < kKeys; column += kThreads) {
        float sum = 0.0f;
        for (int row = 0; row < kRows; ++row) sum += s_sum[at(row, column)];
        s_sum[at(0, column)] = sum;
      }
      __syncthreads();
    }
    if (over_columns) {
      for (int row = threadIdx.x; row < kRows; row += kThreads) {
        float sum = 0.0f;
        for (int column = 0; column < kKeys; ++column) sum += s_sum[at(row, column)];
        s_sum[at(row, 0)] = sum;
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void store_share(float* g_share) const {
    for (int n = threadIdx.x; n < kRows * kKeys / 4; n += kThreads)
      reinterpret_cast<float4*>(g_share)[n] =
          *reinterpret_cast<const float4*>(s_sum + at(n * 4 / kKeys, n * 4 % kKeys));
  }

  __device__ __forceinline__ void store(const BackwardParams& p, const DbiasTile& tile) const {
    const ScoreView& d = p.dbias;
    const int first_row = tile.query * kRows, first_column = tile.key * kKeys;
    const int64_t first = tile.batch * d.batch_stride + tile.head * d.head_stride + first_row * d.row_stride +
                          first_column * d.col_stride;
    const bool is_full = first_row + kRows <= p.seqlen_q && first_column + kKeys <= p.seqlen_k;
    switch (d.dtype) {
      case DType::kFloat16:
        return store_as(p, static_cast<__half*>(d.data) + first, first_row, first_column, is_full);
      case DType::kBFloat16:
        return store_as(p, static_cast<__nv_bfloat16*>(d.data) + first, first_row, first_column, is_full);
      case DType::kFloat32:
        return store_as(p, static_cast<float*>(d.data) + first, first_row, first_column, is_full);
      case DType::kFloat64:
        return store_elements(p, static_cast<double*>(d.data) + first, first_row, first_column);
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ void store_as(const BackwardParams& p, T* g_tile, int first_row, int first_column,
                                           bool is_full) const {
    const ScoreView& d = p.dbias;
    const auto start = reinterpret_cast<uint64_t>(g_tile), stride = static_cast<uint64_t>(d.row_stride) * sizeof(T);
    if (!is_full || d.row_stride == 0 || d.col_stride != 1 || (start | stride) % 16 != 0)
      return store_elements(p, g_tile, first_row, first_column);
    constexpr int kPerRow = kKeys / kColumns;
#pragma unroll 4
    for (int n = threadIdx.x; n < kRows * kPerRow; n += kThreads) {
      const int row = n / kPerRow, column = n % kPerRow * kColumns;
      const float4* const s_values = reinterpret_cast<const float4*>(s_sum + at(row, column));
      const float4 x = s_values[0], y = s_values[1];
      auto* const g_values = reinterpret_cast<uint4*>(g_tile + row * d.row_stride + column);
      if constexpr (sizeof(T) == 4) {
        reinterpret_cast<float4*>(g_values)[0] = x;
        reinterpret_cast<float4*>(g_values)[1] = y;
      } else {
        *g_values =
            uint4{ptx::pack2<T>(x.x, x.y), ptx::pack2<T>(x.z, x.w), ptx::pack2<T>(y.x, y.y), ptx::pack2<T>(y.z, y.w)};
      }
    }
  }

  /// Stores element by element. A dimension that is broadcast has element 0 alone.
  template <class T>
  __device__ __forceinline__ void store_elements(const BackwardParams& p, T* g_tile, int first_row,
                                                 int first_column) const {
    const ScoreView& d = p.dbias;
    const int64_t rows = d.row_stride == 0 ? 1 : p.seqlen_q - first_row;
    const int64_t columns = d.col_stride == 0 ? 1 : p.seqlen_k - first_column;
#pragma unroll 1
    for (int n = threadIdx.x; n < kRows * kKeys; n += kThreads) {
      const int row = n / kKeys, column = n % kKeys;
      if (row < rows && column < columns)
        g_tile[row * d.row_stride + column * d.col_stride] = static_cast<T>(s_sum[at(row, column)]);
    }
  }
};

}  // namespace flash_ext
