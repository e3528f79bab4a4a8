// Row terms, which the backward computes once per query: D = rowsum(dO * O) - dlse. With it
//   dS = P * (dP - D)   and, for the sink, which only enlarges the denominator,   dsink = -sum exp(sink - lse) D.
#pragma once

#include "kernels.h"
#include "query_panel.h"
#include "sequence.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

inline int64_t row_term_items(const BackwardJob& job) {
  return job.params.heads_q * job.tiles_before[job.params.batch];
}

template <class T>
int64_t row_term_scratch(const BackwardJob& job) {
  return 2 * round_up(job.params.head_dim_v, Shape<T>::kLanes) * static_cast<int64_t>(sizeof(T));
}

/// Sum of a[d] * b[d]; both are readable, and zero, up to whole vectors.
template <class T>
FLASH_EXT_INLINE T dot(const T* a, const T* b, int64_t dim) {
  Vec<T> sums{};
  for (int64_t d = 0; d < dim; d += Shape<T>::kLanes) sums += load(a + d) * load(b + d);
  return horizontal_sum<T>(sums);
}

/// Computes the row terms of one tile of rows.
template <class T>
void row_term_item(const BackwardJob& job, int64_t item, void* scratch) {
  const BackwardParams& p = job.params;
  const ItemOfSequence of(job.tiles_before, p.batch, p.heads_q, item);
  const int64_t first = of.index % of.tiles * job.tile_rows, head = of.index / of.tiles;
  const Sequence seq = sequence_of(p, of.batch);
  T* grad_out = static_cast<T*>(scratch);
  T* out = grad_out + round_up(p.head_dim_v, Shape<T>::kLanes);
  __builtin_memset(scratch, 0, row_term_scratch<T>(job));
  for (int64_t i = first; i < min(first + job.tile_rows, seq.seqlen_q); ++i) {
    T term = 0;
    if (*query_lse<T>(p.lse, seq, i, head) != -static_cast<T>(kInfinity)) {
      if (p.grad_out.data != nullptr) {
        load_row(grad_out, query_row(p.grad_out, p.dtype, seq, i, head), p.dtype, p.head_dim_v);
        load_row(out, query_row(p.out, p.dtype, seq, i, head), p.dtype, p.head_dim_v);
        term = dot(grad_out, out, p.head_dim_v);
      }
      if (p.grad_lse.data != nullptr) term -= *query_lse<T>(p.grad_lse, seq, i, head);
    }
    static_cast<T*>(job.row_term)[row_of_head(p, 0, seq, head, i)] = term;
  }
}

inline int64_t sink_gradient_items(const BackwardJob& job) { return job.params.heads_q; }

/// Computes dsink of one head, summed over batch and queries in order.
template <class T>
void sink_gradient_item(const BackwardJob& job, int64_t head, void*) {
  const BackwardParams& p = job.params;
  const T* terms = static_cast<const T*>(job.row_term);
  const T sink = static_cast<const T*>(p.sink)[head];
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence seq = sequence_of(p, b);
    for (int64_t i = 0; i < seq.seqlen_q; ++i) {
      const T lse = *query_lse<T>(p.lse, seq, i, head);
      if (lse == -static_cast<T>(kInfinity)) continue;
      sum -= static_cast<double>(exp(sink - lse)) * terms[row_of_head(p, 0, seq, head, i)];
    }
  }
  static_cast<T*>(p.dsink)[head] = static_cast<T>(sum);
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
