// lse and D of the rows of a head. Other backwards have a kernel for them.
#pragma once

#include "storage.cuh"

namespace flash_ext::sm90 {

/// Computes lse and D of a warpgroup's 64 queries while tiles are loaded. g_minus_delta: where -D of the head goes in
/// memory; null: it is not wanted there. Returns whether this thread found a LargeLse.
template <class Config>
__device__ __forceinline__ bool write_short_terms(const BackwardParams& p, const Sequence& sequence,
                                                  BackwardShortStorage<Config>& storage, float* g_minus_delta,
                                                  int first_query, int thread) {
  using Element = typename Config::Element;
  constexpr int kChunk = 16 / sizeof(Element), kLanes = Config::kHeadDim / kChunk, kStep = kWarpgroupThreads / kLanes;
  const auto out = query_rows<const Element>(p.out, sequence);
  const auto grad_out = query_rows<const Element>(p.grad_out, sequence);
  const float* const g_lse = static_cast<const float*>(p.lse.data) + sequence.lse_offset(p.lse);
  const float* const g_grad_lse =
      p.grad_lse.data ? static_cast<const float*>(p.grad_lse.data) + sequence.lse_offset(p.grad_lse) : nullptr;
  const bool sink_takes_all = p.sink && static_cast<const float*>(p.sink)[sequence.head] == INFINITY;
  const int lane = thread % kLanes, column = lane * kChunk;
  bool large = false;
#pragma unroll
  for (int row = thread / kLanes; row < kWarpgroupRows; row += kStep) {
    const int i = first_query + row;
    const bool inside = i < sequence.seqlen_q;
    float sum = 0.0f;
    bool finite = true;
    if (inside && column < p.head_dim_v) {
      const uint4 gradient = *reinterpret_cast<const uint4*>(grad_out.row(i) + column);
      finite = is_finite<Element>(gradient);
      sum = dot<Element>(gradient, *reinterpret_cast<const uint4*>(out.row(i) + column));
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      finite &= __shfl_xor_sync(~0u, static_cast<int>(finite), step) != 0;
    }
    if (lane != 0) continue;
    const float grad_lse = inside && g_grad_lse ? g_grad_lse[i] : 0.0f;
    const RowTerms terms = row_terms_of<Element>(sum - grad_lse, finite, inside ? g_lse[i] : -INFINITY, sink_takes_all);
    large |= terms.large;
    storage.lse[i] = terms.lse;
    storage.minus_delta[i] = terms.minus_delta;
    if (g_minus_delta && inside) g_minus_delta[i] = terms.minus_delta;
  }
  return large;
}

}  // namespace flash_ext::sm90
