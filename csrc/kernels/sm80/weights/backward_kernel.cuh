// Backward of attention_weights, from the gradient G of the weights W, with c the derivative of the softcap:
//
//   dS = W * G     dlse_i = -sum_j dS_ij     dq_i = scale * sum_j (c dS)_ij k_j     dk_j = scale * sum_i (c dS)_ij q_i
//
// One kernel walks the keys of a tile of queries for dq and dlse, another the queries of a tile of keys, of all heads
// of its group, for dk: both add up in a fixed order.
//
// A CTA owns one slab of columns of dq or dk: beyond head_dim 64, dS is computed once for each slab.
#pragma once

#include "kernels/sm80/common/gradient_tile.cuh"
#include "kernels/sm80/common/slab_sums.cuh"

namespace flash_ext::sm80 {

/// Computes the gradient of the products q . k, and adds the lane's share of the row sums of dS to `sum`.
template <class Element>
__device__ __forceinline__ void product_gradient(ScoreFragment& ds, const ScoreTile<Element>& tile,
                                                 const BackwardParams& p, float (&sum)[2]) {
  tile.template scores<true>(ds);
  to_weights<ScoreUnit<Element>>(ds, p, tile.sequence, p.lse, p.dropout_mode, tile.coordinates());
  multiply_by_gradient(ds, tile, p.grad_weights);
  for_each_score(ds, [&](float& x, int, int, int e) { sum[e / 2] += x; });
  tile.times_cap_slope(ds);
}

__device__ __forceinline__ void store_dlse(const BackwardParams& p, const Sequence& sequence, int first_row,
                                           float (&ds_sum)[2]) {
  float* const g_dlse = static_cast<float*>(p.dlse.data) + sequence.lse_offset(p.dlse);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_row(ds_sum[r]);
    const int i = first_row + 8 * r;
    if (threadIdx.x % 4 == 0 && i < sequence.seqlen_q) g_dlse[i] = -sum;
  }
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    weights_dq_kernel(const __grid_constant__ BackwardParams p, int slabs, int query_tiles) {
  extern __shared__ __align__(128) char shared[];
  const SlabIndex index(slabs, query_tiles, static_cast<int>(p.heads_q));
  const Sequence sequence(p, index.batch, index.head);
  const int first_query = index.tile * kScoreRows;
  if (first_query >= sequence.seqlen_q) return;
  ScoreFragment dq = {};
  float ds_sum[2] = {};
  sum_over_keys<Element>(dq, p, sequence, first_query, index.slab, shared,
                         [&](ScoreFragment& ds, const auto& tile) { product_gradient(ds, tile, p, ds_sum); });
  const ScoreTile<Element> tile(p, sequence, first_query, 0, shared);
  if (p.dlse.data && index.slab == 0) store_dlse(p, sequence, tile.coordinates().row(0, 0), ds_sum);
  if (!p.dq.data) return;
  store_sum(dq, static_cast<float>(p.softmax_scale), tile, query_rows<Element>(p.dq, sequence), first_query,
            sequence.seqlen_q, static_cast<int>(p.head_dim), index.slab);
}

template <class Element>
__global__ void __launch_bounds__(kScoreThreads, ScoreTile<Element>::kCtasPerSm)
    weights_dk_kernel(const __grid_constant__ BackwardParams p, int slabs, int key_tiles) {
  extern __shared__ __align__(128) char shared[];
  const SlabIndex index(slabs, key_tiles, static_cast<int>(p.heads_kv));
  const Sequence of_group(p, index.batch, index.head * static_cast<int>(p.heads_q / p.heads_kv));
  const int first_key = index.tile * kScoreKeys, columns = static_cast<int>(p.head_dim);
  if (first_key >= of_group.seqlen_k) return;
  ScoreFragment dk = {};
  sum_over_queries<Element>(dk, p, of_group, first_key, p.q, columns, index.slab, shared,
                            [&](ScoreFragment& ds, const auto& tile) {
                              float ds_sum[2] = {};
                              product_gradient(ds, tile, p, ds_sum);
                            });
  const ScoreTile<Element> tile(p, of_group, 0, first_key, shared);
  store_sum(dk, static_cast<float>(p.softmax_scale), tile, key_rows<Element, false>(p, p.dk, of_group), first_key,
            of_group.seqlen_k, columns, index.slab);
}

template <class Element>
void run_weights_backward(const BackwardParams& p, cudaStream_t stream) {
  const int64_t slabs = (p.head_dim + kScoreSlab - 1) / kScoreSlab;
  const auto shape = [&](int64_t ctas) {
    return LaunchShape{grid_of(ctas), dim3(kScoreThreads), ScoreTile<Element>::kSharedBytes};
  };
  if (p.dq.data || p.dlse.data) {
    const int64_t tiles = score_tiles(p.seqlen_q), slabs_of_dq = p.dq.data ? slabs : 1;
    launch("sm80/weights_backward", weights_dq_kernel<Element>, shape(slabs_of_dq * tiles * p.batch * p.heads_q),
           stream, p, static_cast<int>(slabs_of_dq), static_cast<int>(tiles));
  }
  if (p.dk.data) {
    const int64_t tiles = score_tiles(p.seqlen_k);
    launch("sm80/weights_backward", weights_dk_kernel<Element>, shape(slabs * tiles * p.batch * p.heads_kv), stream, p,
           static_cast<int>(slabs), static_cast<int>(tiles));
  }
}

}  // namespace flash_ext::sm80
