// The gradient of a tile of scores as they enter the softmax, which is also the gradient of the bias:
//
//   attention_weights:   dS = W * G                   G: gradient of the weights W = f P;   f: dropout
//   attention:           dS = P * (f dP - delta)      dP = dO V^T,   delta = rowsum(dO * O) - grad_lse
//
// with P = e^(S - lse).
#pragma once

#include "score_tile.cuh"

namespace flash_ext::sm80 {

/// Turns weights into dS of attention_weights.
template <class Element>
__device__ __forceinline__ void multiply_by_gradient(ScoreFragment& w, const ScoreTile<Element>& tile,
                                                     const ScoreView& gradient) {
  tile.template load_matrix<Element>(gradient);
  // A weight of 0 gives 0, whatever the gradient.
  tile.for_each_in_matrix(w, [](float& x, float g) { x = x == 0.0f ? 0.0f : x * g; });
}

/// Turns scores into dS of attention. `delta` holds a number for each (head, row of q in memory).
template <class Element>
__device__ __forceinline__ void compute_ds(ScoreFragment& s, const ScoreTile<Element>& tile, const BackwardParams& p,
                                           const float* delta) {
  const Sequence& sequence = tile.sequence;
  const TileCoordinates<false> at = tile.coordinates();
  ScoreFragment dp = {};
  if (p.grad_out.data) {
    tile.multiply_rows(dp, query_rows<Element>(p.grad_out, sequence), tile.first_query, sequence.seqlen_q,
                       key_rows<Element, false>(p, p.v, sequence), tile.first_key, sequence.seqlen_k,
                       static_cast<int>(p.head_dim_v));
  }
  apply_dropout(dp, p, sequence, kDropoutApply, at);
  const WeightRows<ScoreUnit<Element>> rows(p.lse, sequence, at.row(0, 0));
  float term[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = at.row(0, 2 * r);
    term[r] = i < sequence.seqlen_q ? delta[row_of_head(p, sequence, i)] : 0.0f;
  }
  for_each_score(s, [&](float& x, int m, int n, int e) {
    const float weight = rows.weight(x, e / 2);
    // Where the weight is 0 the rest may be NaN, from keys or rows that this query does not see.
    x = weight == 0.0f ? 0.0f : weight * (dp[m][n][e] - term[e / 2]);
  });
}

}  // namespace flash_ext::sm80
