// The largest score of each head of each batch entry:   m_bh = max_ij s_ij   over the pairs that are visible.
//
// A CTA owns a tile of queries, which stays in shared memory where it fits, and visits every key_splits-th of the key
// tiles that these queries see. At the end it raises m in memory to the largest score that it has met. Tiles of packed
// sequences are counted along the rows in memory: that takes no list, and no bound on the lengths.
#pragma once

#include <algorithm>

#include "kernels/common/score/max_logit.cuh"
#include "kernels/sm80/common/score_tile.cuh"

namespace flash_ext::sm80 {

/// A tile of queries of a sequence, for one head.
struct QueryTile {
  int batch, tile;
};

/// Finds tile number n of all packed sequences. Sequence b has the numbers from cu_seqlens[b] / 64 + b on. These are as
/// many as its rows can need, wherever it begins.
__device__ __forceinline__ QueryTile packed_query_tile(const AttentionParams& p, int n) {
  const auto first_tile = [&](int b) {
    return static_cast<int>(clamp_index(p.seq.cu_seqlens_q[b], 0, p.total_q)) / kScoreRows + b;
  };
  int low = 0, high = static_cast<int>(p.batch) - 1;  // the last sequence whose first tile is at most n
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first_tile(middle) <= n) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {low, n - first_tile(low)};
}

/// Returns the largest of the tile's scores and `largest`, in the unit of scores. Rows past the last query do not
/// count.
template <class Element>
__device__ __forceinline__ float largest_of(ScoreFragment& s, const ScoreTile<Element>& tile, float largest) {
  const TileCoordinates<false> at = tile.coordinates();
  for_each_score(s, [&](float& x, int m, int, int e) {
    if (at.row(m, e) < tile.sequence.seqlen_q) largest = ptx::max_or_nan(largest, x);
  });
  return largest;
}

/// Returns the largest number of all threads in the first of them.
__device__ __forceinline__ float largest_of_cta(float x) {
  __shared__ float s_largest[kScoreThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = ptx::max_or_nan(x, __shfl_xor_sync(~0u, x, distance));
  if (threadIdx.x % 32 == 0) s_largest[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kScoreThreads / 32; ++warp) x = ptx::max_or_nan(x, s_largest[warp]);
  return x;
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    max_logit_kernel(const __grid_constant__ ForwardParams p, int query_tiles, int key_splits) {
  extern __shared__ __align__(128) char shared[];
  const int split = blockIdx.x % key_splits, heads_q = static_cast<int>(p.heads_q);
  const int number = query_tiles - 1 - blockIdx.x / key_splits % query_tiles;  // causal: the most keys first
  const int batch_head = blockIdx.x / key_splits / query_tiles;
  const QueryTile of = p.seq.cu_seqlens_q ? packed_query_tile(p, number) : QueryTile{batch_head / heads_q, number};
  const Sequence sequence(p, of.batch, batch_head % heads_q);
  const int first_query = of.tile * kScoreRows;
  if (of.tile < 0 || first_query >= sequence.seqlen_q) return;

  const TileSpan span = sequence.key_tiles<kScoreKeys>(first_query, min(first_query + kScoreRows, sequence.seqlen_q));
  bool has_queries = false;
  float largest = -INFINITY;
#pragma unroll 1
  for (int n = span.begin + split; n < span.end; n += key_splits) {
    ScoreTile<Element> tile(p, sequence, first_query, n * kScoreKeys, shared);
    if (!tile.sees_any()) continue;
    ScoreFragment s;
    tile.template scores<false>(s, has_queries);
    has_queries = tile.keeps_queries();
    largest = largest_of(s, tile, largest);
  }

  largest = largest_of_cta(largest);
  if (threadIdx.x == 0) raise_max_logit(p, sequence, largest * ScoreUnit<Element>::kNaturalPer);
}

/// The number of CTAs that share the keys of a tile of queries, so that all CTAs fill the GPU a few times.
template <class Element>
int64_t max_logit_key_splits(int64_t query_tiles, int64_t key_tiles) {
  constexpr int64_t kWaves = 4;
  const int64_t wanted = kWaves * ScoreTile<Element>::kCtasPerSm * device_attribute(cudaDevAttrMultiProcessorCount);
  return std::clamp<int64_t>(wanted / std::max<int64_t>(query_tiles, 1), 1, std::max<int64_t>(key_tiles, 1));
}

template <class Element>
void run_max_logit(const ForwardParams& p, cudaStream_t stream) {
  if (p.batch == 0) return;  // rows of no sequence
  const bool packed = p.seq.cu_seqlens_q != nullptr;
  const int64_t query_tiles = packed ? p.total_q / kScoreRows + p.batch : score_tiles(p.seqlen_q);
  const int64_t heads = packed ? p.heads_q : p.batch * p.heads_q;
  const int64_t key_splits = max_logit_key_splits<Element>(query_tiles * heads, score_tiles(p.seqlen_k));
  launch("sm80/max_logit", max_logit_kernel<Element>,
         {grid_of(query_tiles * heads * key_splits), dim3(kScoreThreads), ScoreTile<Element>::kSharedBytes}, stream, p,
         static_cast<int>(query_tiles), static_cast<int>(key_splits));
}

}  // namespace flash_ext::sm80
