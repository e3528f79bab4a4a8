// Attention backward where the tiles of kernel.cuh do not fit into shared memory: float beyond head_dim 128 on GPUs
// with less than 173 KB a CTA.
//
// It computes 64 x 64 scores at a time (sm80/common/score_tile.cuh), which take any head dim in slabs of columns. It is
// slow, because it computes S and dP again for each slab of each of dQ, dK and dV. Sums have a fixed order.
#pragma once

#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/bias_gradient/row_terms.cuh"
#include "kernels/sm80/common/gradient_tile.cuh"
#include "kernels/sm80/common/slab_sums.cuh"
#include "names.h"

namespace flash_ext::sm80 {

/// Computes the gradient of the products q . k of a tile. `delta`: see compute_ds().
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
  const int first_query = index.tile * kScoreRows;
  if (index.tile < 0 || first_query >= sequence.seqlen_q) return;
  ScoreFragment dq = {};
  sum_over_keys<Element>(dq, p, sequence, first_query, index.slab, shared,
                         [&](ScoreFragment& ds, const auto& tile) { attention_product_gradient(ds, tile, p, delta); });
  const ScoreTile<Element> tile(p, sequence, first_query, 0, shared);
  store_sum(dq, static_cast<float>(p.softmax_scale), tile, query_rows<Element>(p.dq, sequence), first_query,
            sequence.seqlen_q, static_cast<int>(p.head_dim), index.slab);
}

/// Computes a slab of dK, or of dV, of a tile of keys, summed over the queries of all heads of the group.
template <class Element, bool kValues>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    slab_dkv_kernel(const __grid_constant__ BackwardParams p, const float* delta, const TileNumbers numbers,
                    int slabs) {
  extern __shared__ __align__(128) char shared[];
  const SlabIndex index(p, numbers, slabs);
  const Sequence of_group(p, index.batch, index.head * static_cast<int>(p.heads_q / p.heads_kv));
  const int first_key = index.tile * kScoreKeys, columns = static_cast<int>(kValues ? p.head_dim_v : p.head_dim);
  if (index.tile < 0 || first_key >= of_group.seqlen_k) return;
  ScoreFragment sum = {};
  if (!kValues || p.grad_out.data) {  // no gradient of out is one of zeros
    sum_over_queries<Element>(sum, p, of_group, first_key, kValues ? p.grad_out : p.q, columns, index.slab, shared,
                              [&](ScoreFragment& s, const auto& tile) {
                                if constexpr (kValues) {
                                  tile.template scores<false>(s);
                                  to_weights<ScoreUnit<Element>>(s, p, tile.sequence, p.lse, kDropoutApply,
                                                                 tile.coordinates());
                                } else {
                                  attention_product_gradient(s, tile, p, delta);
                                }
                              });
  }
  const ScoreTile<Element> tile(p, of_group, 0, first_key, shared);
  store_sum(sum, kValues ? 1.0f : static_cast<float>(p.softmax_scale), tile,
            key_rows<Element, false>(p, kValues ? p.dv : p.dk, of_group), first_key, of_group.seqlen_k, columns,
            index.slab);
}

template <class Element, int kHeadDim>
struct SlabBackward {
  /// Row terms in the order of rows in memory (delta) and, for the sink, in the order of tiles (tiles).
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
  /// The parameters for row terms alone: no sums of dQ, no turns and no tiles of masks.
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
