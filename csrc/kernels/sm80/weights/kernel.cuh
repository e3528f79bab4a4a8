// The attention weights themselves:   w_ij = e^(s_ij - lse_i), 0 where j is hidden from i;   lse is an input.
//
// A CTA owns a tile of queries and keys.
#pragma once

#include "kernels/sm80/common/score_tile.cuh"

namespace flash_ext::sm80 {

/// A warp stores its rows of a tile in shared memory to the result.
template <class Element>
__device__ __forceinline__ void store_weights(const WeightsParams& p, const ScoreTile<Element>& tile, uint32_t s_tile) {
  const ScoreView& view = p.weights;
  Element* const g_weights = tile.template place_in<Element>(view);
  const int num_rows = static_cast<int>(p.seqlen_q) - tile.first_query;
  const int num_columns = static_cast<int>(p.seqlen_k) - tile.first_key;
  if (tile.template rows_are_aligned<Element>(view) && num_columns >= kScoreKeys) {
    store_rows<Element, kScoreKeys>(s_tile, RowSource<Element, false>{g_weights, view.row_stride}, tile.warp_row, 16, 0,
                                    num_rows, kScoreKeys, tile.lane);
    return;
  }
  for (int row = tile.warp_row; row < min(tile.warp_row + 16, num_rows); ++row) {
#pragma unroll
    for (int column = tile.lane; column < kScoreKeys; column += 32) {
      if (column < num_columns)
        g_weights[row * view.row_stride + column * view.col_stride] =
            load_shared<Element>(s_tile + ScoreTile<Element>::element_at(row, column));
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    weights_kernel(const __grid_constant__ WeightsParams p, int query_tiles, int key_tiles) {
  extern __shared__ __align__(128) char shared[];
  const int key_tile = blockIdx.x % key_tiles, query_tile = blockIdx.x / key_tiles % query_tiles;
  const int batch_head = blockIdx.x / key_tiles / query_tiles, heads_q = static_cast<int>(p.heads_q);
  const Sequence sequence(p, batch_head / heads_q, batch_head % heads_q);
  // Weights of packed sequences are 0 beforehand.
  if (p.seq.cu_seqlens_q &&
      (query_tile * kScoreRows >= sequence.seqlen_q || key_tile * kScoreKeys >= sequence.seqlen_k))
    return;
  ScoreTile<Element> tile(p, sequence, query_tile * kScoreRows, key_tile * kScoreKeys, shared);
  ScoreFragment w = {};
  if (tile.sees_any()) {
    tile.template scores<false>(w);
    to_weights<ScoreUnit<Element>>(w, p, sequence, p.lse, p.dropout_mode, tile.coordinates());
  }
  tile.store_fragment(tile.slab(0), w);
  __syncwarp();
  store_weights(p, tile, tile.slab(0));
}

template <class Element>
void run_weights(const WeightsParams& p, cudaStream_t stream) {
  const int64_t query_tiles = score_tiles(p.seqlen_q), key_tiles = score_tiles(p.seqlen_k);
  const int64_t ctas = p.batch * p.heads_q * query_tiles * key_tiles;
  launch("sm80/weights", weights_kernel<Element>,
         {grid_of(ctas), dim3(kScoreThreads), ScoreTile<Element>::kSharedBytes}, stream, p,
         static_cast<int>(query_tiles), static_cast<int>(key_tiles));
}

}  // namespace flash_ext::sm80
