// Gradients of a tile, one slab of 64 columns, summed in a fixed order over all tiles that it sees (dQ) or that see it
// (dK, dV). make(fragment, tile) computes what is multiplied by the rows: dS, or for dV the weights.
#pragma once

#include "score_tile.cuh"
#include "slab_index.cuh"

namespace flash_ext::sm80 {

/// sum += make(tile) K, over the tiles of keys that 64 queries see. Without dQ only make() is called.
template <class Element, class Make>
__device__ __forceinline__ void sum_over_keys(ScoreFragment& sum, const BackwardParams& p, const Sequence& sequence,
                                              int first_query, int slab, char* shared, Make make) {
  const TileRange range = tile_range(first_query, min(first_query + kScoreRows, sequence.seqlen_q), sequence.seqlen_k,
                                     sequence.window(), kScoreKeys);
  const auto keys = key_rows<Element, false>(p, p.k, sequence);
#pragma unroll 1
  for (int n = static_cast<int>(range.begin); n < range.end; ++n) {
    ScoreTile<Element> tile(p, sequence, first_query, n * kScoreKeys, shared);
    if (!tile.sees_any()) continue;
    ScoreFragment fragment;
    make(fragment, tile);
    if (p.dq.data)
      tile.accumulate(sum, fragment, keys, tile.first_key, sequence.seqlen_k, static_cast<int>(p.head_dim), slab);
  }
}

/// sum += make(tile)^T rows, over the tiles of queries, of all heads of the group, that see 64 keys. `view`: of the
/// rows of queries, q or grad_out, which have `columns` columns.
template <class Element, class View, class Make>
__device__ __forceinline__ void sum_over_queries(ScoreFragment& sum, const BackwardParams& p, const Sequence& of_group,
                                                 int first_key, const View& view, int columns, int slab, char* shared,
                                                 Make make) {
  const int first_head = of_group.head, end_head = first_head + static_cast<int>(p.heads_q / p.heads_kv);
  const TileRange range = tile_range(first_key, min(first_key + kScoreKeys, of_group.seqlen_k), of_group.seqlen_q,
                                     transposed(of_group.window()), kScoreRows);
#pragma unroll 1
  for (int head = first_head; head < end_head; ++head) {
    const Sequence sequence(p, of_group.batch, head);
    const auto rows = query_rows<Element>(view, sequence);
#pragma unroll 1
    for (int m = static_cast<int>(range.begin); m < range.end; ++m) {
      ScoreTile<Element> tile(p, sequence, m * kScoreRows, first_key, shared);
      if (!tile.sees_any()) continue;
      ScoreFragment fragment;
      make(fragment, tile);
      tile.accumulate_transposed(sum, fragment, rows, tile.first_query, sequence.seqlen_q, columns, slab);
    }
  }
}

/// Stores dQ, dK or dV: `factor` times a sum, to the rows from `first` on.
template <class Element, class Rows>
__device__ __forceinline__ void store_sum(ScoreFragment& sum, float factor, const ScoreTile<Element>& tile,
                                          const Rows& rows, int first, int num_rows, int columns, int slab) {
  for_each_score(sum, [&](float& x, int, int, int) { x *= factor; });
  tile.store_slab(sum, rows, first, num_rows, columns, slab);
}

}  // namespace flash_ext::sm80
