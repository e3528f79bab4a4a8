// The gradient of an additive bias: dS, summed over the dimensions in which the bias is broadcast.
//
// A block owns a tile of dbias: one batch entry and head of it, and 64 of its rows and columns; where dbias is
// broadcast, all of that dimension. It recomputes dS of every tile of scores that falls on it, in a fixed order, so
// that neither atomics nor an N x N buffer are needed. Where dbias has few tiles, each has several blocks with a chunk
// of the sum each, and the chunks are added in order afterwards.
//
//   row terms:  delta = rowsum(dO * O) - grad_lse       for attention alone, see gradient_tile.cuh
//   tiles:      dbias, or each chunk's share of it
//   chunks:     dbias from the shares
#pragma once

#include <algorithm>

#include "gradient_tile.cuh"

namespace flash_ext::sm80 {

/// How dbias is cut. The number of chunks depends on the shapes alone, and thereby the order of the sum.
struct BiasTiles {
  static constexpr int64_t kWantedBlocks = 512;
  static constexpr int64_t kMaxChunks = 65535;  // of gridDim.y

  int batches, heads, query_tiles, key_tiles;                  // of dbias
  int sum_batches, sum_heads, sum_query_tiles, sum_key_tiles;  // of scores, that fall on one tile of dbias
  int64_t chunks;

  explicit BiasTiles(const BackwardParams& p) {
    const auto cut = [](int64_t stride, int64_t size, int& tiles, int& summed) {
      tiles = static_cast<int>(stride == 0 ? 1 : size);
      summed = static_cast<int>(stride == 0 ? size : 1);
    };
    cut(p.dbias.batch_stride, p.batch, batches, sum_batches);
    cut(p.dbias.head_stride, p.heads_q, heads, sum_heads);
    cut(p.dbias.row_stride, score_tiles(p.seqlen_q), query_tiles, sum_query_tiles);
    cut(p.dbias.col_stride, score_tiles(p.seqlen_k), key_tiles, sum_key_tiles);
    const int64_t wanted = kWantedBlocks / std::max<int64_t>(1, count());
    chunks = std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(summed(), 1, kMaxChunks));
  }

  FLASH_EXT_HOST_DEVICE int64_t count() const { return int64_t{batches} * heads * query_tiles * key_tiles; }
  FLASH_EXT_HOST_DEVICE int64_t summed() const {
    return int64_t{sum_batches} * sum_heads * sum_query_tiles * sum_key_tiles;
  }
  FLASH_EXT_HOST_DEVICE static int64_t tile_elements() { return kScoreRows * kScoreKeys; }
};

struct BiasWorkspace {
  float* delta = nullptr;   // (heads_q, rows of q in memory)
  float* shares = nullptr;  // (chunks, tiles, 64 x 64)
  int64_t bytes = 0;

  BiasWorkspace(const BackwardParams& p, const BiasTiles& tiles, void* memory) {
    if (!p.grad_weights.data) delta = take(memory, p.heads_q * rows_of_head(p));
    if (tiles.chunks > 1) shares = take(memory, tiles.chunks * tiles.count() * BiasTiles::tile_elements());
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

  /// Number n of a grid with that many tiles along each dimension, keys innermost.
  __device__ __forceinline__ DbiasTile(int64_t n, int key_tiles, int query_tiles, int heads) {
    key = static_cast<int>(n % key_tiles);
    query = static_cast<int>(n / key_tiles % query_tiles);
    head = static_cast<int>(n / key_tiles / query_tiles % heads);
    batch = static_cast<int>(n / key_tiles / query_tiles / heads);
  }
  __device__ __forceinline__ DbiasTile(const BiasTiles& tiles, int64_t n)
      : DbiasTile(n, tiles.key_tiles, tiles.query_tiles, tiles.heads) {}
};

/// The tiles of scores that fall on a tile of dbias, one after the other from the n-th on.
struct Summands {
  const BiasTiles& tiles;
  const DbiasTile& first;
  DbiasTile offset;

  __device__ __forceinline__ Summands(const BiasTiles& tiles, const DbiasTile& first, int64_t n)
      : tiles(tiles), first(first), offset(n, tiles.sum_key_tiles, tiles.sum_query_tiles, tiles.sum_heads) {}

  __device__ __forceinline__ int first_key() const { return (first.key + offset.key) * kScoreKeys; }
  __device__ __forceinline__ int first_query() const { return (first.query + offset.query) * kScoreRows; }
  __device__ __forceinline__ int head() const { return first.head + offset.head; }
  __device__ __forceinline__ int batch() const { return first.batch + offset.batch; }

  __device__ __forceinline__ void next() {
    if (++offset.key < tiles.sum_key_tiles) return;
    offset.key = 0;
    if (++offset.query < tiles.sum_query_tiles) return;
    offset.query = 0;
    if (++offset.head < tiles.sum_heads) return;
    offset.head = 0;
    ++offset.batch;
  }
};

/// A warp per row.
template <class Element>
__global__ void __launch_bounds__(kScoreThreads)
    bias_row_terms_kernel(const __grid_constant__ BackwardParams p, float* delta, int row_blocks) {
  constexpr int kPiece = 16 / sizeof(Element);
  const int batch_head = blockIdx.x / row_blocks, heads_q = static_cast<int>(p.heads_q);
  const Sequence sequence(p, batch_head / heads_q, batch_head % heads_q);
  const int i = blockIdx.x % row_blocks * (kScoreThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (i >= sequence.seqlen_q) return;
  float sum = 0.0f;
  if (p.grad_out.data) {
    const Element* const grad_out = query_rows<Element>(p.grad_out, sequence).row(i);
    const Element* const out = query_rows<Element>(p.out, sequence).row(i);
    for (int d = lane * kPiece; d < p.head_dim_v; d += 32 * kPiece) {
      const uint4 x = *reinterpret_cast<const uint4*>(grad_out + d), y = *reinterpret_cast<const uint4*>(out + d);
#pragma unroll
      for (int k = 0; k < kPiece; ++k)
        sum += static_cast<float>(reinterpret_cast<const Element*>(&x)[k]) *
               static_cast<float>(reinterpret_cast<const Element*>(&y)[k]);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (lane != 0) return;
  if (p.grad_lse.data) sum -= static_cast<const float*>(p.grad_lse.data)[sequence.lse_offset(p.grad_lse) + i];
  delta[row_of_head(p, sequence, i)] = sum;
}

__device__ __forceinline__ void store_bias(const ScoreView& view, int64_t at, float x) {
  switch (view.dtype) {
    case DType::kFloat16:
      static_cast<__half*>(view.data)[at] = __float2half(x);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(view.data)[at] = __float2bfloat16(x);
      break;
    case DType::kFloat32:
      static_cast<float*>(view.data)[at] = x;
      break;
    case DType::kFloat64:
      static_cast<double*>(view.data)[at] = x;
      break;
  }
}

/// Where element `n` of a tile of dbias belongs; false if nowhere. Of a broadcast dimension only element 0 is there.
__device__ __forceinline__ bool place_in_bias(const BackwardParams& p, const DbiasTile& tile, int n, int64_t& at) {
  const ScoreView& d = p.dbias;
  const int row = n / kScoreKeys, column = n % kScoreKeys;
  if ((d.row_stride == 0 && row > 0) || (d.col_stride == 0 && column > 0)) return false;
  const int i = tile.query * kScoreRows + row, j = tile.key * kScoreKeys + column;
  if ((d.row_stride != 0 && i >= p.seqlen_q) || (d.col_stride != 0 && j >= p.seqlen_k)) return false;
  at = tile.batch * d.batch_stride + tile.head * d.head_stride + i * d.row_stride + j * d.col_stride;
  return true;
}

/// The sum of a tile, in shared memory: in registers it would not fit beside the products. Rows are 4 floats apart from
/// whole banks.
constexpr int kBiasRowFloats = kScoreKeys + 4;
constexpr int kBiasSumBytes = kScoreRows * kBiasRowFloats * 4;
static_assert(ScoreTile<float>::kSharedBytes + kBiasSumBytes <= kSmallestSharedBytes,
              "every GPU must be able to launch it");

/// Sums over rows, columns or both into the first. By all threads of the block.
__device__ __forceinline__ void sum_broadcast(float* s_sum, bool over_rows, bool over_columns) {
  if (over_rows && threadIdx.x < kScoreKeys) {
    float sum = 0.0f;
    for (int row = 0; row < kScoreRows; ++row) sum += s_sum[row * kBiasRowFloats + threadIdx.x];
    s_sum[threadIdx.x] = sum;
  }
  __syncthreads();
  if (over_columns && threadIdx.x < kScoreRows) {
    float sum = 0.0f;
    for (int column = 0; column < kScoreKeys; ++column) sum += s_sum[threadIdx.x * kBiasRowFloats + column];
    s_sum[threadIdx.x * kBiasRowFloats] = sum;
  }
  __syncthreads();
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kBlocksPerSm)
    bias_gradient_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasTiles tiles,
                         const float* delta, float* shares) {
  extern __shared__ __align__(128) char shared[];
  const DbiasTile mine(tiles, blockIdx.x);
  const int64_t begin = tiles.summed() * blockIdx.y / gridDim.y, end = tiles.summed() * (blockIdx.y + 1) / gridDim.y;
  float* const s_sum = reinterpret_cast<float*>(shared + ScoreTile<Element>::kSharedBytes);
  const auto at = TileCoordinates<false>::of_lane(threadIdx.x / 32 * 16, 0, threadIdx.x % 32);
  const auto own = [&](int m, int n, int e) -> float& {
    return s_sum[at.row(m, e) * kBiasRowFloats + at.column(n, e)];
  };
  ScoreFragment ds;
  for_each_score(ds, [&](float&, int m, int n, int e) { own(m, n, e) = 0.0f; });
  Summands summands(tiles, mine, begin);
#pragma unroll 1
  for (int64_t n = begin; n < end; ++n, summands.next()) {
    const Sequence sequence(p, summands.batch(), summands.head());
    ScoreTile<Element> tile(p, sequence, summands.first_query(), summands.first_key(), shared);
    if (!tile.sees_any()) continue;
    tile.template scores<false>(ds);
    if (p.grad_weights.data) {
      to_weights(ds, p, sequence, p.lse, p.dropout_mode, tile.coordinates());
      multiply_by_gradient(ds, tile, p.grad_weights);
    } else {
      differentiate(ds, tile, p, delta);
    }
    for_each_score(ds, [&](float& x, int m, int n, int e) { own(m, n, e) += x; });
  }

  __syncthreads();
  sum_broadcast(s_sum, p.dbias.row_stride == 0, p.dbias.col_stride == 0);
  for (int n = threadIdx.x; n < BiasTiles::tile_elements(); n += kScoreThreads) {
    int64_t place;
    if (!place_in_bias(p, mine, n, place)) continue;
    const float x = s_sum[n / kScoreKeys * kBiasRowFloats + n % kScoreKeys];
    if (shares) {
      shares[(blockIdx.y * tiles.count() + blockIdx.x) * BiasTiles::tile_elements() + n] = x;
    } else {
      store_bias(p.dbias, place, x);
    }
  }
}

/// A block per tile of dbias.
static __global__ void __launch_bounds__(kScoreThreads)
    bias_chunks_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasTiles tiles,
                       const float* shares) {
  const DbiasTile mine(tiles, blockIdx.x);
  for (int n = threadIdx.x; n < BiasTiles::tile_elements(); n += kScoreThreads) {
    int64_t place;
    if (!place_in_bias(p, mine, n, place)) continue;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < tiles.chunks; ++chunk)
      sum += shares[(chunk * tiles.count() + blockIdx.x) * BiasTiles::tile_elements() + n];
    store_bias(p.dbias, place, sum);
  }
}

template <class Element>
void run_bias_gradient(const BackwardParams& p, void* memory, cudaStream_t stream) {
  const BiasTiles tiles(p);
  const BiasWorkspace workspace(p, tiles, memory);
  if (workspace.delta) {
    const int64_t row_blocks = (p.seqlen_q + kScoreThreads / 32 - 1) / (kScoreThreads / 32);
    launch("sm80/bias_gradient", bias_row_terms_kernel<Element>,
           {dim3(grid_size(row_blocks * p.batch * p.heads_q)), dim3(kScoreThreads)}, stream, p, workspace.delta,
           static_cast<int>(row_blocks));
  }
  const unsigned count = grid_size(tiles.count());
  launch("sm80/bias_gradient", bias_gradient_kernel<Element>,
         {dim3(count, static_cast<unsigned>(tiles.chunks)), dim3(kScoreThreads),
          ScoreTile<Element>::kSharedBytes + kBiasSumBytes},
         stream, p, tiles, workspace.delta, workspace.shares);
  if (workspace.shares) {
    launch("sm80/bias_gradient", bias_chunks_kernel, {dim3(count), dim3(kScoreThreads)}, stream, p, tiles,
           workspace.shares);
  }
}

}  // namespace flash_ext::sm80
