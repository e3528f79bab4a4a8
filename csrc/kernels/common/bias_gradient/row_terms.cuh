// The row term of the bias gradient, which dS needs:   delta = rowsum(dO * O) - grad_lse
#pragma once

#include "kernels/common/divisor.h"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"

namespace flash_ext {

constexpr int kBiasRowTermThreads = 128;
constexpr int kRowTermLanes = 8;  // of a row: 128 bytes at a time
constexpr int kRowTermRows = kBiasRowTermThreads / kRowTermLanes;

/// Writes delta of all rows in memory, whatever sequence has them. It is static, as backward_row_terms_kernel is.
template <class Element>
static __global__ void __launch_bounds__(kBiasRowTermThreads)
    bias_row_terms_kernel(const __grid_constant__ BackwardParams p, float* delta, unsigned row_blocks,
                          const __grid_constant__ LongDivisor rows_of_entry) {
  constexpr int kChunk = 16 / sizeof(Element);
  const int64_t rows = rows_of_head(p), head = blockIdx.x / row_blocks;
  const int64_t n = int64_t{blockIdx.x % row_blocks} * kRowTermRows + threadIdx.x / kRowTermLanes;
  const int64_t batch = static_cast<int64_t>(rows_of_entry.quotient(n)), i = n - batch * rows_of_entry.value;
  const int lane = threadIdx.x % kRowTermLanes;
  float sum = 0.0f;
  if (p.grad_out.data && n < rows) {
    const auto row_of = [&](const TensorView& view) {
      return static_cast<const Element*>(view.data) + batch * view.batch_stride + i * view.row_stride +
             head * view.head_stride;
    };
    const Element *const grad_out = row_of(p.grad_out), *const out = row_of(p.out);
    for (int d = lane * kChunk; d < p.head_dim_v; d += kRowTermLanes * kChunk) {
      const uint4 x = *reinterpret_cast<const uint4*>(grad_out + d), y = *reinterpret_cast<const uint4*>(out + d);
#pragma unroll
      for (int k = 0; k < kChunk; ++k)
        sum += static_cast<float>(reinterpret_cast<const Element*>(&x)[k]) *
               static_cast<float>(reinterpret_cast<const Element*>(&y)[k]);
    }
  }
#pragma unroll
  for (int lanes = kRowTermLanes / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (lane != 0 || n >= rows) return;
  const LseView& grad_lse = p.grad_lse;
  if (grad_lse.data)
    sum -= static_cast<const float*>(grad_lse.data)[batch * grad_lse.batch_stride + head * grad_lse.head_stride + i];
  delta[head * rows + n] = sum;
}

/// Launches the kernel that writes delta, (heads_q, rows of q in memory).
template <class Element>
void launch_bias_row_terms(const BackwardParams& p, float* delta, cudaStream_t stream) {
  const int64_t row_blocks = (rows_of_head(p) + kRowTermRows - 1) / kRowTermRows;
  const LongDivisor rows_of_entry(p.seq.cu_seqlens_q ? p.total_q : p.seqlen_q);
  launch("row terms of the gradient of bias", bias_row_terms_kernel<Element>,
         {grid_of(row_blocks * p.heads_q), dim3(kBiasRowTermThreads)}, stream, p, delta,
         static_cast<unsigned>(row_blocks), rows_of_entry);
}

}  // namespace flash_ext
