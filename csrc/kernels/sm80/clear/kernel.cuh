// Writes the rows that no sequence covers: those outside of every [cu_seqlens[b], cu_seqlens[b] + used), or beyond
// seqused of a dense batch entry. Lengths are clamped by the same Sequence that the other kernels use, so each row is
// written either there or here.
//
// Each lane looks one row up. Then the warp writes, one by one, the rows of its 32 that no sequence covers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int kClearThreads = 128;

/// The results of a row of q (or of k), for each of its heads. Null = absent.
struct ClearTargets {
  char* rows[2] = {};
  int64_t batch_bytes[2] = {};
  int64_t row_bytes[2] = {};
  int64_t head_bytes[2] = {};
  int64_t chunks[2] = {};  // of 16 bytes, of one head
  int64_t heads = 0;
  LseView lse;
  float lse_value = 0.0f;

  bool any() const { return rows[0] || rows[1] || lse.data; }
};

/// The rows of one side as they lie in memory: (batch, rows), one batch entry of all rows for varlen.
struct ClearRows {
  int64_t batch;
  int64_t rows;
  bool varlen;
};

/// The last sequence that begins at or before a row, -1 = none. Of several that begin there only the last can hold
/// rows.
__device__ __forceinline__ int last_sequence_before(const int32_t* cu_seqlens, int64_t batch, int64_t row) {
  int low = 0, high = static_cast<int>(batch);
  while (low < high) {
    const int middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

template <bool kOfKeys>
__device__ __forceinline__ bool is_covered(const AttentionParams& p, const ClearRows& memory, int64_t batch,
                                           int64_t row) {
  if (memory.varlen) batch = last_sequence_before(kOfKeys ? p.seq.cu_seqlens_k : p.seq.cu_seqlens_q, p.batch, row);
  if (batch < 0) return false;
  const Sequence sequence(p, static_cast<int>(batch), 0);
  const int64_t begin = kOfKeys ? sequence.k_begin : sequence.q_begin;
  return row >= begin && row < begin + (kOfKeys ? sequence.seqlen_k : sequence.seqlen_q);
}

/// Clears a row of all heads. Called by one warp.
__device__ __forceinline__ void clear_row(const ClearTargets& targets, int64_t batch, int64_t row, int lane) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (targets.rows[k] == nullptr) continue;
    char* const base = targets.rows[k] + batch * targets.batch_bytes[k] + row * targets.row_bytes[k];
    for (int64_t head = 0; head < targets.heads; ++head) {
      uint4* const chunks = reinterpret_cast<uint4*>(base + head * targets.head_bytes[k]);
      for (int64_t chunk = lane; chunk < targets.chunks[k]; chunk += 32) chunks[chunk] = uint4{0, 0, 0, 0};
    }
  }
  if (targets.lse.data == nullptr) return;
  float* const lse = static_cast<float*>(targets.lse.data) + batch * targets.lse.batch_stride + row;
  for (int64_t head = lane; head < targets.heads; head += 32) lse[head * targets.lse.head_stride] = targets.lse_value;
}

template <bool kOfKeys>
__global__ void __launch_bounds__(kClearThreads)
    clear_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ ClearTargets targets,
                 const __grid_constant__ ClearRows memory) {
  const int lane = threadIdx.x % 32;
  const int64_t flat = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  const bool exists = flat < memory.batch * memory.rows;
  uint32_t todo = __ballot_sync(~0u, exists && !is_covered<kOfKeys>(p, memory, flat / memory.rows, flat % memory.rows));
  for (; todo != 0; todo &= todo - 1) {
    const int64_t other = flat - lane + __ffs(todo) - 1;
    clear_row(targets, other / memory.rows, other % memory.rows, lane);
  }
}

inline void set_target(ClearTargets& targets, int k, const TensorView& view, DType dtype, int64_t head_dim) {
  const int64_t size = dtype == DType::kFloat32 ? 4 : 2;
  targets.rows[k] = static_cast<char*>(view.data);
  targets.batch_bytes[k] = view.batch_stride * size;
  targets.row_bytes[k] = view.row_stride * size;
  targets.head_bytes[k] = view.head_stride * size;
  targets.chunks[k] = head_dim * size / 16;
}

template <bool kOfKeys>
void run_clear(const AttentionParams& p, const ClearTargets& targets, cudaStream_t stream) {
  const bool varlen = (kOfKeys ? p.seq.cu_seqlens_k : p.seq.cu_seqlens_q) != nullptr;
  const bool partly_used = (kOfKeys ? p.seq.seqused_k : p.seq.seqused_q) != nullptr;
  if (!targets.any() || !(varlen || partly_used)) return;
  const int64_t total = kOfKeys ? p.total_k : p.total_q, seqlen = kOfKeys ? p.seqlen_k : p.seqlen_q;
  const ClearRows memory = varlen ? ClearRows{1, total, true} : ClearRows{p.batch, seqlen, false};
  const int64_t ctas = (memory.batch * memory.rows + kClearThreads - 1) / kClearThreads;
  launch("clear", clear_kernel<kOfKeys>, {grid_of(ctas), dim3(kClearThreads)}, stream, p, targets, memory);
}

inline void run_clear_forward(const ForwardParams& p, cudaStream_t stream) {
  ClearTargets targets;
  set_target(targets, 0, p.out, p.dtype, p.head_dim_v);
  targets.heads = p.heads_q;
  targets.lse = p.lse;
  targets.lse_value = -INFINITY;
  run_clear<false>(p, targets, stream);
}

inline void run_clear_backward(const BackwardParams& p, cudaStream_t stream) {
  ClearTargets of_q;
  set_target(of_q, 0, p.dq, p.dtype, p.head_dim);
  of_q.heads = p.heads_q;
  of_q.lse = p.dlse;
  run_clear<false>(p, of_q, stream);

  ClearTargets of_k;
  set_target(of_k, 0, p.dk, p.dtype, p.head_dim);
  set_target(of_k, 1, p.dv, p.dtype, p.head_dim_v);
  of_k.heads = p.heads_kv;
  run_clear<true>(p, of_k, stream);
}

}  // namespace flash_ext::sm80
