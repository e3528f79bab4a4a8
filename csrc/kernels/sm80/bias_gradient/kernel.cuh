// The gradient of an additive bias: dS, summed over the dimensions in which the bias is broadcast.
//
//   dS = P * (f dP - delta)    dP = dO V^T,  P = e^(S - lse),  f: dropout      or, of attention_weights,  W * G
//
// A CTA owns a tile of dbias: one batch entry and head of it, and kRows x kKeys of its rows and columns; where dbias
// is broadcast, all of that dimension. It recomputes dS of every tile of scores that falls on it, in a fixed order, and
// adds up in registers, so that neither atomics nor an N x N buffer are needed. Where dbias has few tiles, each has
// several CTAs with a chunk of the sum each, and the chunks are added in order afterwards.
//
//   row terms:  delta = rowsum(dO * O) - grad_lse       for attention alone
//   tiles:      dbias, or each chunk's share of it
//   chunks:     dbias from the shares
//
// Slabs of 64 columns of Q and K, then of dO and V, go through a ring of stages, whatever the head dim. Copies are
// under way for all stages but the one that is multiplied. There is a barrier for each stage. The bias of a CTA's tile
// is the same for all score tiles that fall on it, and is copied once.
#pragma once

#include "consumer.cuh"
#include "kernels/common/bias_gradient/row_terms.cuh"
#include "kernels/ptx/reread.h"

namespace flash_ext::sm80 {

template <class Element>
__global__ void __launch_bounds__(BiasShape<Element>::kThreads, BiasShape<Element>::kCtasPerSm)
    bias_gradient_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasTiles tiles,
                         const __grid_constant__ BiasShared plan, const float* delta, float* shares) {
  extern __shared__ __align__(128) char shared[];
  using Consumer = BiasConsumer<Element>;
  // Computed again in the end: the loop has no registers for it.
  const auto mine = [&] { return DbiasTile(tiles, ptx::reread(static_cast<int>(blockIdx.x))); };
  Consumer consumer(p, tiles, plan, delta, shared);
  typename Consumer::Fragment sum;
  for_each_score(sum, [](float& x, int, int, int) { x = 0.0f; });
  consumer.run(sum, mine());

  const typename Consumer::Sum result{reinterpret_cast<float*>(shared)};
  consumer.store(result, sum);
  result.sum_broadcast(p.dbias.row_stride == 0, p.dbias.col_stride == 0);
  if (shares) {
    result.store_share(shares + (blockIdx.y * tiles.count() + blockIdx.x) * tiles.tile_elements());
  } else {
    result.store(p, mine());
  }
}

/// Adds up the shares of the chunks: a CTA per tile of dbias.
template <int kRows, int kKeys>
__global__ void __launch_bounds__(kScoreThreads)
    bias_chunks_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasTiles tiles,
                       const float* shares) {
  extern __shared__ __align__(128) char shared[];
  using Sum = BiasSum<kRows, kKeys, kScoreThreads>;
  const Sum result{reinterpret_cast<float*>(shared)};
  const int rows = p.dbias.row_stride == 0 ? 1 : kRows;  // that hold something
  for (int n = threadIdx.x; n < rows * kKeys; n += kScoreThreads) {
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < tiles.chunks; ++chunk)
      sum += shares[(chunk * tiles.count() + blockIdx.x) * (kRows * kKeys) + n];
    result.s_sum[Sum::at(n / kKeys, n % kKeys)] = sum;
  }
  __syncthreads();
  result.store(p, DbiasTile(tiles, blockIdx.x));
}

template <class Element>
BiasShared bias_shared(const BackwardParams& p) {
  return bias_shared({sizeof(Element) == 4, can_stage_bias(p.bias), p.bias.dtype, p.mask.data || p.blocks.offsets,
                      shared_bytes_per_cta(), shared_bytes_per_sm()});
}

template <class Element>
void run_bias_gradient(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Shape = BiasShape<Element>;
  const BiasTiles tiles = BiasTiles::of<Element>(p);
  const BiasWorkspace workspace(p, tiles, memory);
  if (workspace.delta) launch_bias_row_terms<Element>(p, workspace.delta, stream);
  const dim3 count = grid_of(tiles.count());
  const BiasShared plan = bias_shared<Element>(p);
  launch("sm80/bias_gradient", bias_gradient_kernel<Element>,
         {grid_of(tiles.count(), tiles.chunks), dim3(Shape::kThreads), static_cast<size_t>(plan.bytes)}, stream, p,
         tiles, plan, workspace.delta, workspace.shares);
  if (workspace.shares) {
    constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
    launch("sm80/bias_gradient", bias_chunks_kernel<kRows, kKeys>,
           {count, dim3(kScoreThreads), BiasSum<kRows, kKeys, kScoreThreads>::kBytes}, stream, p, tiles,
           workspace.shares);
  }
}

}  // namespace flash_ext::sm80
