// Attention backward where the tiles of kernel.cuh do not fit into shared memory: float beyond head_dim 128 on GPUs
// with less than 173 KB a CTA.
//
// It computes 64 x 64 scores at a time (sm80/common/score_tile.cuh), which take any head dim in slabs of columns. It is
// slow, because it computes S and dP again for each slab of each of dQ, dK and dV. Sums have a fixed order.
#pragma once

#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/bias_gradient/row_terms.cuh"
#include "kernels/sm80/common/gradient_tile.cuh"
#include "kernels/sm80/common/slab_index.cuh"
#include "names.h"

namespace flash_ext::sm80 {

/// The gradient of the products q . k of a tile. `delta`: see compute_ds().
template <class Element>
__device__ __forceinline__ void attention_product_gradient(ScoreFragment& ds, const ScoreTile<Element>& tile,
                                                           const BackwardParams& p, const float* delta) {
  tile.template scores<false>(ds);
  compute_ds(ds, tile, p, delta);
  if (p.softcap == 0.0) return;
  const ScoreRules<Element> rules(p, tile.sequence);
  ScoreFragment products;
  tile.multiply_rows(products, query_rows<Element>(p.q, tile.sequence), tile.first_query, tile.sequence.seqlen_q,
                     key_rows<Element, false>(p, p.k, tile.sequence), tile.first_key, tile.sequence.seqlen_k,
                     static_cast<int>(p.head_dim));
  for_each_score(ds, [&](float& x, int m, int n, int e) {
    const float t = softcap_tanh<Element>(products[m][n][e] * rules.scale);
    x = x == 0.0f ? 0.0f : x * softcap_slope(t);  // of a hidden pair t may be NaN
  });
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    slab_dq_kernel(const __grid_constant__ BackwardParams p, const float* delta, const TileNumbers numbers, int slabs) {
  extern __shared__ __align__(128) char shared[];
  const SlabIndex index(p, numbers, slabs);
  const Sequence sequence(p, index.batch, index.head);
  const int first_query = index.tile * kScoreRows, columns = static_cast<int>(p.head_dim);
  if (index.tile < 0 || first_query >= sequence.seqlen_q) return;
  const TileRange range = tile_range(first_query, min(first_query + kScoreRows, sequence.seqlen_q), sequence.seqlen_k,
                                     sequence.window(), kScoreKeys);
  const auto keys = key_rows<Element, false>(p, p.k, sequence);
  ScoreFragment dq = {};
#pragma unroll 1
  for (int n = static_cast<int>(range.begin); n < range.end; ++n) {
    ScoreTile<Element> tile(p, sequence, first_query, n * kScoreKeys, shared);
    if (!tile.sees_any()) continue;
    ScoreFragment ds;
    attention_product_gradient(ds, tile, p, delta);
    tile.accumulate(dq, ds, keys, tile.first_key, sequence.seqlen_k, columns, index.slab);
  }
  for_each_score(dq, [&](float& x, int, int, int) { x *= static_cast<float>(p.softmax_scale); });
  const ScoreTile<Element> tile(p, sequence, first_query, 0, shared);
  tile.store_slab(dq, query_rows<Element>(p.dq, sequence), first_query, sequence.seqlen_q, columns, index.slab);
}

/// dK, or dV: a slab of a tile of keys, summed over the queries of all heads of the group.
template <class Element, bool kValues>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    slab_dkv_kernel(const __grid_constant__ BackwardParams p, const float* delta, const TileNumbers numbers,
                    int slabs) {
  extern __shared__ __align__(128) char shared[];
  const SlabIndex index(p, numbers, slabs);
  const int group = static_cast<int>(p.heads_q / p.heads_kv), first_head = index.head * group;
  const Sequence of_group(p, index.batch, first_head);
  const int first_key = index.tile * kScoreKeys, columns = static_cast<int>(kValues ? p.head_dim_v : p.head_dim);
  if (index.tile < 0 || first_key >= of_group.seqlen_k) return;
  const TileRange range = tile_range(first_key, min(first_key + kScoreKeys, of_group.seqlen_k), of_group.seqlen_q,
                                     transposed(of_group.window()), kScoreRows);
  const bool has_rows = !kValues || p.grad_out.data;  // no gradient of out is one of zeros
  ScoreFragment sum = {};
#pragma unroll 1
  for (int head = first_head; has_rows && head < first_head + group; ++head) {
    const Sequence sequence(p, index.batch, head);
    const auto rows = query_rows<Element>(kValues ? p.grad_out : p.q, sequence);
#pragma unroll 1
    for (int m = static_cast<int>(range.begin); m < range.end; ++m) {
      ScoreTile<Element> tile(p, sequence, m * kScoreRows, first_key, shared);
      if (!tile.sees_any()) continue;
      ScoreFragment s;
      if constexpr (kValues) {
        tile.template scores<false>(s);
        to_weights<ScoreUnit<Element>>(s, p, sequence, p.lse, kDropoutApply, tile.coordinates());
      } else {
        attention_product_gradient(s, tile, p, delta);
      }
      tile.accumulate_transposed(sum, s, rows, tile.first_query, sequence.seqlen_q, columns, index.slab);
    }
  }
  const float factor = kValues ? 1.0f : static_cast<float>(p.softmax_scale);
  for_each_score(sum, [&](float& x, int, int, int) { x *= factor; });
  const ScoreTile<Element> tile(p, of_group, 0, first_key, shared);
  tile.store_slab(sum, key_rows<Element, false>(p, kValues ? p.dv : p.dk, of_group), first_key, of_group.seqlen_k,
                  columns, index.slab);
}

template <class Element, int kHeadDim>
struct SlabBackward {
  /// The row terms in the order of rows in memory, and, for the sink, in that of tiles.
  struct Workspace {
    int64_t delta_bytes;
    float* delta;
    BackwardWorkspace tiles;

    Workspace(const BackwardParams& p, void* memory)
        : delta_bytes((p.heads_q * rows_of_head(p) * 4 + 255) / 256 * 256),
          delta(static_cast<float*>(memory)),
          tiles(without_gradients(p), kScoreRows, kScoreKeys, kHeadDim, static_cast<char*>(memory) + delta_bytes) {}
    int64_t bytes() const { return delta_bytes + tiles.bytes; }
  };

  static int64_t bytes(const BackwardParams& p) { return Workspace(p, nullptr).bytes(); }

  static void run(const BackwardParams& p, void* memory, cudaStream_t stream) {
    const Workspace workspace(p, memory);
    launch_bias_row_terms<Element>(p, workspace.delta, stream);
    if (p.dq.data) run(slab_dq_kernel<Element>, p, workspace.delta, p.head_dim, WorkListSide::kQueries, stream);
    if (p.dk.data) run(slab_dkv_kernel<Element, false>, p, workspace.delta, p.head_dim, WorkListSide::kKeys, stream);
    if (p.dv.data) run(slab_dkv_kernel<Element, true>, p, workspace.delta, p.head_dim_v, WorkListSide::kKeys, stream);
    if (!p.dsink) return;
    using Rows = BackwardRowKernels<Element, void, kScoreRows, kHeadDim>;
    launch_row_terms<Rows>(p, workspace.tiles, kBackwardNames, stream);
    launch_sink_gradient<Rows>(p, workspace.tiles, kBackwardNames, stream);
  }

 private:
  /// Row terms alone: no sums of dQ, no turns and no tiles of masks.
  static BackwardParams without_gradients(BackwardParams p) {
    p.dq.data = nullptr;
    p.bias.data = p.mask.data = nullptr;
    p.blocks.offsets = nullptr;
    return p;
  }

  static void run(void (*kernel)(BackwardParams, const float*, TileNumbers, int), const BackwardParams& p,
                  const float* delta, int64_t columns, WorkListSide side, cudaStream_t stream) {
    static_assert(kScoreRows == kScoreKeys);
    const int64_t heads = side == WorkListSide::kKeys ? p.heads_kv : p.heads_q;
    const int64_t slabs = (columns + kScoreSlab - 1) / kScoreSlab;
    const TileNumbers numbers(p, side, kScoreRows, heads);
    launch("sm80/backward slabs", kernel,
           {grid_of(slabs * numbers.count * heads), dim3(kScoreThreads), ScoreTile<Element>::kSharedBytes}, stream, p,
           delta, numbers, static_cast<int>(slabs));
  }
};

}  // namespace flash_ext::sm80
