// Where the sequence of a batch entry lies in memory: dense, varlen, partly used, left-padded or paged.
#pragma once

#include "convert.h"
#include "kernels/common/mask/tile_range.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// One batch entry. Lengths and first rows are clamped to what the tensors hold.
struct Sequence {
  int64_t batch;
  int64_t q_row;  // first row of q, out and lse
  int64_t seqlen_q;
  int64_t k_batch;
  int64_t k_row;  // first row of k and v, left padding included
  int64_t seqlen_k;
  Window window;
  const int32_t* pages;  // null unless paged
  int64_t page_size;
  int64_t num_pages;
};

FLASH_EXT_INLINE Interval rows_of_sequence(const int32_t* cu_seqlens, int64_t batch, int64_t total, int64_t seqlen) {
  if (cu_seqlens == nullptr) return {0, seqlen};
  const int64_t begin = clamp_index(cu_seqlens[batch], 0, total);
  return {begin, clamp_index(cu_seqlens[batch + 1], begin, min(total, begin + seqlen))};
}

inline Sequence sequence_of(const AttentionParams& p, int64_t batch) {
  const SequenceParams& s = p.seq;
  const Interval q = rows_of_sequence(s.cu_seqlens_q, batch, p.total_q, p.seqlen_q);
  int64_t seqlen_q = q.end - q.begin;
  if (s.seqused_q != nullptr) seqlen_q = clamp_index(s.seqused_q[batch], 0, seqlen_q);

  Sequence seq{};
  seq.batch = batch;
  seq.k_batch = batch;
  if (s.cache_batch_idx != nullptr)
    seq.k_batch = clamp_index(s.cache_batch_idx[batch], 0, max<int64_t>(s.cache_batch - 1, 0));

  int64_t seqlen_k;
  if (s.block_table != nullptr) {
    seq.pages = s.block_table + batch * s.block_table_stride;
    seq.page_size = s.page_size;
    seq.num_pages = s.num_pages;
    const int64_t capacity = s.max_pages * s.page_size;
    seqlen_k = s.cu_seqlens_k == nullptr ? min(p.seqlen_k, capacity)
                                         : clamp_index(int64_t{s.cu_seqlens_k[batch + 1]} - s.cu_seqlens_k[batch], 0,
                                                       min(p.seqlen_k, capacity));
  } else {
    const Interval k = rows_of_sequence(s.cu_seqlens_k, batch, p.total_k, p.seqlen_k);
    seq.k_row = k.begin;
    seqlen_k = k.end - k.begin;
  }
  if (s.seqused_k != nullptr) seqlen_k = clamp_index(s.seqused_k[batch], 0, seqlen_k);
  if (s.leftpad_k != nullptr) {
    const int64_t leftpad = clamp_index(s.leftpad_k[batch], 0, seqlen_k);
    seq.k_row += leftpad;
    seqlen_k -= leftpad;
  }
  seq.q_row = q.begin;
  seq.seqlen_q = seqlen_q;
  seq.seqlen_k = seqlen_k;
  seq.window = make_window(p.window.left, p.window.right, p.window.top_left, seqlen_q, seqlen_k);
  return seq;
}

FLASH_EXT_INLINE char* element(const TensorView& view, DType dtype, int64_t batch, int64_t row, int64_t head) {
  return static_cast<char*>(view.data) +
         (batch * view.batch_stride + row * view.row_stride + head * view.head_stride) * size_of(dtype);
}

/// Row of query i: of q, out and their gradients.
FLASH_EXT_INLINE char* query_row(const TensorView& view, DType dtype, const Sequence& seq, int64_t i, int64_t head) {
  return element(view, dtype, seq.batch, seq.q_row + i, head);
}

template <class T>
FLASH_EXT_INLINE T* query_lse(const LseView& view, const Sequence& seq, int64_t i, int64_t head) {
  return static_cast<T*>(view.data) + seq.batch * view.batch_stride + head * view.head_stride + seq.q_row + i;
}

/// Row of key j of k or v; `run` is how many keys from there on follow at row_stride.
FLASH_EXT_INLINE const char* key_row(const TensorView& view, DType dtype, const Sequence& seq, int64_t j, int64_t head,
                                     int64_t* run) {
  const int64_t row = seq.k_row + j;
  if (seq.pages == nullptr) {
    *run = seq.seqlen_k - j;
    return element(view, dtype, seq.k_batch, row, head);
  }
  const int64_t page = clamp_index(seq.pages[row / seq.page_size], 0, seq.num_pages - 1);
  const int64_t slot = row % seq.page_size;
  *run = seq.page_size - slot;
  return element(view, dtype, page, slot, head);
}

/// Index of query i in a contiguous (parts, heads_q, rows of q in memory).
FLASH_EXT_INLINE int64_t row_of_head(const AttentionParams& p, int64_t part, const Sequence& seq, int64_t head,
                                     int64_t i) {
  const bool varlen = p.seq.cu_seqlens_q != nullptr;
  const int64_t rows = varlen ? p.total_q : p.batch * p.seqlen_q;
  const int64_t first = varlen ? seq.q_row : seq.batch * p.seqlen_q;
  return (part * p.heads_q + head) * rows + first + i;
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
