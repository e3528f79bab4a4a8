// What dS of attention needs of every row:   delta = rowsum(dO * O) - grad_lse
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"

namespace flash_ext {

constexpr int kBiasRowTermThreads = 128;
constexpr int kRowTermLanes = 8;  // of a row: 128 bytes at a time
constexpr int kRowTermRows = kBiasRowTermThreads / kRowTermLanes;

/// static, as backward_row_terms_kernel is.
template <class Element>
static __global__ void __launch_bounds__(kBiasRowTermThreads)
    bias_row_terms_kernel(const __grid_constant__ BackwardParams p, float* delta, int row_blocks) {
  constexpr int kPiece = 16 / sizeof(Element);
  const int batch_head = blockIdx.x / row_blocks, heads_q = static_cast<int>(p.heads_q);
  const Sequence sequence(p, batch_head / heads_q, batch_head % heads_q);
  const int i = blockIdx.x % row_blocks * kRowTermRows + threadIdx.x / kRowTermLanes;
  const int lane = threadIdx.x % kRowTermLanes;
  float sum = 0.0f;
  if (p.grad_out.data && i < sequence.seqlen_q) {
    const Element* const grad_out = query_rows<Element>(p.grad_out, sequence).row(i);
    const Element* const out = query_rows<Element>(p.out, sequence).row(i);
    for (int d = lane * kPiece; d < p.head_dim_v; d += kRowTermLanes * kPiece) {
      const uint4 x = *reinterpret_cast<const uint4*>(grad_out + d), y = *reinterpret_cast<const uint4*>(out + d);
#pragma unroll
      for (int k = 0; k < kPiece; ++k)
        sum += static_cast<float>(reinterpret_cast<const Element*>(&x)[k]) *
               static_cast<float>(reinterpret_cast<const Element*>(&y)[k]);
    }
  }
#pragma unroll
  for (int lanes = kRowTermLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (lane != 0 || i >= sequence.seqlen_q) return;
  if (p.grad_lse.data) sum -= static_cast<const float*>(p.grad_lse.data)[sequence.lse_offset(p.grad_lse) + i];
  delta[row_of_head(p, sequence, i)] = sum;
}

/// delta is (heads_q, rows of q in memory).
template <class Element>
void launch_bias_row_terms(const BackwardParams& p, float* delta, cudaStream_t stream) {
  const int64_t row_blocks = (p.seqlen_q + kRowTermRows - 1) / kRowTermRows;
  launch("sm80/bias_gradient", bias_row_terms_kernel<Element>,
         {grid_of(row_blocks * p.batch * p.heads_q), dim3(kBiasRowTermThreads)}, stream, p, delta,
         static_cast<int>(row_blocks));
}

}  // namespace flash_ext
