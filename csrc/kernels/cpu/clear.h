// Clears rows that belong to no sequence, or lie past its used part: out 0, lse -inf, gradients 0. The other kernels
// write only rows of sequences, so where there can be other rows, everything is cleared first.
#pragma once

#include "kernels.h"
#include "sequence.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

constexpr int64_t kRowsPerItem = 256;

/// Rows of q (or k) as they lie in memory: (batches, rows), one batch of all rows for varlen.
struct MemoryRows {
  int64_t batches = 0;
  int64_t rows = 0;

  static MemoryRows of_q(const AttentionParams& p) {
    if (p.seq.cu_seqlens_q != nullptr) return {1, p.total_q};
    return p.seq.seqused_q != nullptr ? MemoryRows{p.batch, p.seqlen_q} : MemoryRows{};
  }
  static MemoryRows of_k(const AttentionParams& p) {
    if (p.seq.cu_seqlens_k != nullptr) return {1, p.total_k};
    return p.seq.seqused_k != nullptr ? MemoryRows{p.batch, p.seqlen_k} : MemoryRows{};
  }

  int64_t items_per_batch() const { return ceil_div(rows, kRowsPerItem); }
  int64_t items() const { return batches * items_per_batch(); }
};

FLASH_EXT_INLINE void clear_rows(const TensorView& view, DType dtype, const MemoryRows& memory, int64_t item,
                                 int64_t heads, int64_t dim) {
  if (view.data == nullptr) return;
  const int64_t batch = item / memory.items_per_batch();
  const int64_t begin = item % memory.items_per_batch() * kRowsPerItem;
  for (int64_t row = begin; row < min(begin + kRowsPerItem, memory.rows); ++row) {
    for (int64_t h = 0; h < heads; ++h) __builtin_memset(element(view, dtype, batch, row, h), 0, dim * size_of(dtype));
  }
}

template <class T>
void clear_lse(const LseView& view, const MemoryRows& memory, int64_t item, int64_t heads, T value) {
  if (view.data == nullptr) return;
  const int64_t batch = item / memory.items_per_batch();
  const int64_t begin = item % memory.items_per_batch() * kRowsPerItem;
  for (int64_t h = 0; h < heads; ++h) {
    T* rows = static_cast<T*>(view.data) + batch * view.batch_stride + h * view.head_stride;
    for (int64_t row = begin; row < min(begin + kRowsPerItem, memory.rows); ++row) rows[row] = value;
  }
}

template <class Job>
int64_t no_scratch(const Job&) {
  return 0;
}

inline int64_t clear_forward_items(const ForwardJob& job) { return MemoryRows::of_q(job.params).items(); }

template <class T>
void clear_forward_item(const ForwardJob& job, int64_t item, void*) {
  const ForwardParams& p = job.params;
  const MemoryRows memory = MemoryRows::of_q(p);
  clear_rows(p.out, p.dtype, memory, item, p.heads_q, p.head_dim_v);
  clear_lse(p.lse, memory, item, p.heads_q, -static_cast<T>(kInfinity));
}

inline int64_t clear_backward_items(const BackwardJob& job) {
  return MemoryRows::of_q(job.params).items() + MemoryRows::of_k(job.params).items();
}

template <class T>
void clear_backward_item(const BackwardJob& job, int64_t item, void*) {
  const BackwardParams& p = job.params;
  const MemoryRows q = MemoryRows::of_q(p), k = MemoryRows::of_k(p);
  if (item < q.items()) {
    clear_rows(p.dq, p.dtype, q, item, p.heads_q, p.head_dim);
    clear_lse(p.dlse, q, item, p.heads_q, T(0));
  } else {
    clear_rows(p.dk, p.dtype, k, item - q.items(), p.heads_kv, p.head_dim);
    clear_rows(p.dv, p.dtype, k, item - q.items(), p.heads_kv, p.head_dim_v);
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
