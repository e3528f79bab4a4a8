#include "append.h"

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "kernels/common/mask/tile_range.h"
#include "scratch.h"

namespace flash_ext::cpu {
namespace {

using namespace FLASH_EXT_ISA;

constexpr int64_t kGrainRows = 64;  // of head_dim elements, so that threads are worth their start

int64_t cached_rows(const AppendParams& p, int64_t batch) {
  return clamp_index(p.seq.seqused_k[batch], 0, p.seqlen_cache - p.seqlen_new);
}

char* row_of(const TensorView& view, DType dtype, int64_t batch, int64_t row, int64_t head) {
  return static_cast<char*>(view.data) +
         (batch * view.batch_stride + row * view.row_stride + head * view.head_stride) * size_of(dtype);
}

char* cache_row_of(const AppendParams& p, const TensorView& cache, int64_t batch, int64_t row, int64_t head) {
  const SequenceParams& seq = p.seq;
  if (seq.block_table) {
    const int32_t* pages = seq.block_table + batch * seq.block_table_stride;
    const int64_t page = clamp_index(pages[row / seq.page_size], 0, seq.num_pages - 1);
    return row_of(cache, p.dtype, page, row % seq.page_size, head);
  }
  const int64_t entry = seq.cache_batch_idx ? clamp_index(seq.cache_batch_idx[batch], 0, seq.cache_batch - 1) : batch;
  return row_of(cache, p.dtype, entry, row, head);
}

/// x -> x e^(i angle) on the pairs of the first rotary_dim elements.
template <class T>
void rotate(const AppendParams& p, int64_t position, T* row) {
  const int64_t pairs = p.rotary_dim / 2;
  const int64_t at = clamp_index(position, 0, p.rotary_rows - 1);
  for (int64_t n = 0; n < pairs; ++n) {
    const T cos = load_value<T>(p.cos, p.dtype, at * p.cos_row_stride + n);
    const T sin = load_value<T>(p.sin, p.dtype, at * p.sin_row_stride + n);
    T& x = row[p.rotary_interleaved ? 2 * n : n];
    T& y = row[p.rotary_interleaved ? 2 * n + 1 : n + pairs];
    const T turned = x * cos - y * sin;
    y = x * sin + y * cos;
    x = turned;
  }
}

template <class T>
void rotate_row(const AppendParams& p, int64_t position, const char* from, char* to, T* row) {
  load_row(row, from, p.dtype, p.head_dim);
  rotate(p, position, row);
  store_row(to, p.dtype, row, p.head_dim);
}

template <class T>
void append_keys(const AppendParams& p, ParallelFor parallel_for) {
  const int64_t rows = p.batch * p.seqlen_new * p.heads_kv;
  const int64_t scratch_bytes = p.head_dim * static_cast<int64_t>(sizeof(T));
  for_range_with_scratch(rows, kGrainRows, scratch_bytes, parallel_for, [&p](int64_t begin, int64_t end, void* memory) {
    T* scratch = static_cast<T*>(memory);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t head = n % p.heads_kv, t = n / p.heads_kv % p.seqlen_new, batch = n / p.heads_kv / p.seqlen_new;
      const int64_t row = cached_rows(p, batch) + t;
      const char* k = row_of(p.k, p.dtype, batch, t, head);
      char* k_cache = cache_row_of(p, p.k_cache, batch, row, head);
      if (p.cos) {
        rotate_row(p, row, k, k_cache, scratch);
      } else {
        std::memcpy(k_cache, k, p.head_dim * size_of(p.dtype));
      }
      std::memcpy(cache_row_of(p, p.v_cache, batch, row, head), row_of(p.v, p.dtype, batch, t, head),
                  p.head_dim_v * size_of(p.dtype));
    }
  });
}

/// The sequence that a row of q belongs to. Packed rows all lie in batch entry 0 of the tensor, but belong to different
/// sequences.
struct QueryRow {
  int64_t sequence, t;  // query t of a sequence; sequence -1 = no sequence has this row
};

QueryRow query_row(const AppendParams& p, int64_t row) {
  const int32_t* const cu_seqlens = p.seq.cu_seqlens_q;
  if (!cu_seqlens) return {row / p.seqlen_q, row % p.seqlen_q};
  const int64_t sequence = std::upper_bound(cu_seqlens, cu_seqlens + p.batch, row) - cu_seqlens - 1;
  if (sequence < 0 || row >= cu_seqlens[sequence + 1]) return {-1, 0};
  return {sequence, row - cu_seqlens[sequence]};
}

/// Rotates the rows of q that are in memory, not seqlen_q rows of each sequence: of packed sequences, seqlen_q may be
/// as long as all of them together.
template <class T>
void rotate_queries(const AppendParams& p, ParallelFor parallel_for) {
  const bool packed = p.seq.cu_seqlens_q != nullptr;
  const int64_t rows = packed ? p.total_q : p.batch * p.seqlen_q;
  const int64_t scratch_bytes = p.head_dim * static_cast<int64_t>(sizeof(T));
  const auto rotate_some = [&](int64_t begin, int64_t end, void* memory) {
    T* scratch = static_cast<T*>(memory);
    for (int64_t n = begin; n < end; ++n) {
      const int64_t head = n % p.heads_q, row = n / p.heads_q;
      const auto [sequence, t] = query_row(p, row);
      if (sequence < 0) continue;
      const int64_t entry = packed ? 0 : sequence, row_of_entry = packed ? row : t;
      const int64_t position = cached_rows(p, sequence) + (p.rotate_q_by_position ? t : 0);
      rotate_row(p, position, row_of(p.q, p.dtype, entry, row_of_entry, head),
                 row_of(p.q_rotated, p.dtype, entry, row_of_entry, head), scratch);
    }
  };
  for_range_with_scratch(rows * p.heads_q, kGrainRows, scratch_bytes, parallel_for, rotate_some);
}

template <class T>
void append_as(const AppendParams& p, ParallelFor parallel_for) {
  append_keys<T>(p, parallel_for);
  if (p.q_rotated.data) rotate_queries<T>(p, parallel_for);
}

}  // namespace

void append_to_cache(const AppendParams& params, ParallelFor parallel_for) {
  params.dtype == DType::kFloat64 ? append_as<double>(params, parallel_for) : append_as<float>(params, parallel_for);
  for (int64_t b = 0; b < params.batch; ++b) {
    params.seqused_k_after[b] = static_cast<int32_t>(cached_rows(params, b) + params.seqlen_new);
  }
}

}  // namespace flash_ext::cpu
