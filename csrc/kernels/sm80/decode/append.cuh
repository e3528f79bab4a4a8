// Appending to a cache: rows of k (turned by their positions) and of v are written behind those in use, and q is turned
// into q_rotated:
//
//   (x, y) -> (x cos - y sin, x sin + y cos)     for the pairs of the first rotary_dim elements
//
// A warp owns one row, of k and v or of q. One thread of each sequence writes down how many rows are in use afterwards.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/mask/tile_range.h"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext::sm80 {

constexpr int kAppendWarps = 4;

/// Rows of a sequence of the cache before the call, as far as the new ones find room.
__device__ __forceinline__ int64_t cached_rows(const AppendParams& p, int64_t batch) {
  return clamp_index(p.seq.seqused_k[batch], 0, p.seqlen_cache - p.seqlen_new);
}

template <class Element>
__device__ __forceinline__ Element* row_of(const TensorView& view, int64_t batch, int64_t row, int64_t head) {
  return static_cast<Element*>(view.data) + batch * view.batch_stride + row * view.row_stride + head * view.head_stride;
}

template <class Element>
__device__ __forceinline__ Element* cache_row_of(const AppendParams& p, const TensorView& cache, int64_t batch,
                                                 int64_t row, int64_t head) {
  const SequenceParams& seq = p.seq;
  if (seq.block_table) {
    const int32_t* pages = seq.block_table + batch * seq.block_table_stride;
    const uint32_t position = static_cast<uint32_t>(row), page_size = static_cast<uint32_t>(seq.page_size);
    const int64_t page = clamp_index(pages[position / page_size], 0, seq.num_pages - 1);
    return row_of<Element>(cache, page, position % page_size, head);
  }
  const int64_t entry = seq.cache_batch_idx ? clamp_index(seq.cache_batch_idx[batch], 0, seq.cache_batch - 1) : batch;
  return row_of<Element>(cache, entry, row, head);
}

template <class Element>
__device__ __forceinline__ void copy_row(const Element* from, Element* to, int64_t begin, int64_t end, int lane) {
  for (int64_t d = begin + lane; d < end; d += 32) to[d] = from[d];
}

template <class Element>
__device__ __forceinline__ void rotate_row(const AppendParams& p, int64_t position, const Element* from, Element* to,
                                           int lane) {
  const int64_t at = clamp_index(position, 0, p.rotary_rows - 1), pairs = p.rotary_dim / 2;
  const Element* cosines = static_cast<const Element*>(p.cos) + at * p.cos_row_stride;
  const Element* sines = static_cast<const Element*>(p.sin) + at * p.sin_row_stride;
  for (int64_t n = lane; n < pairs; n += 32) {
    const int64_t first = p.rotary_interleaved ? 2 * n : n, second = p.rotary_interleaved ? 2 * n + 1 : n + pairs;
    const float x = static_cast<float>(from[first]), y = static_cast<float>(from[second]);
    const float cos = static_cast<float>(cosines[n]), sin = static_cast<float>(sines[n]);
    to[first] = static_cast<Element>(x * cos - y * sin);
    to[second] = static_cast<Element>(x * sin + y * cos);
  }
  copy_row(from, to, p.rotary_dim, p.head_dim, lane);
}

/// The n-th row of k and v, over (batch, seqlen_new, heads_kv).
template <class Element>
__device__ __forceinline__ void append_row(const AppendParams& p, uint32_t n, int lane) {
  const uint32_t heads = static_cast<uint32_t>(p.heads_kv), seqlen = static_cast<uint32_t>(p.seqlen_new);
  const uint32_t head = n % heads, t = n / heads % seqlen, batch = n / heads / seqlen;
  const int64_t row = cached_rows(p, batch) + t;
  const Element* k = row_of<Element>(p.k, batch, t, head);
  Element* k_cache = cache_row_of<Element>(p, p.k_cache, batch, row, head);
  if (p.cos) {
    rotate_row(p, row, k, k_cache, lane);
  } else {
    copy_row(k, k_cache, 0, p.head_dim, lane);
  }
  copy_row(row_of<Element>(p.v, batch, t, head), cache_row_of<Element>(p, p.v_cache, batch, row, head), 0, p.head_dim_v,
           lane);
}

/// The n-th row of q, over (batch, seqlen_q, heads_q).
template <class Element>
__device__ __forceinline__ void rotate_query(const AppendParams& p, uint32_t n, int lane) {
  const uint32_t heads = static_cast<uint32_t>(p.heads_q), seqlen = static_cast<uint32_t>(p.seqlen_q);
  const uint32_t head = n % heads, t = n / heads % seqlen, batch = n / heads / seqlen;
  const int32_t* cu_seqlens = p.seq.cu_seqlens_q;
  const int64_t row = (cu_seqlens ? clamp_index(cu_seqlens[batch], 0, p.total_q) : 0) + t;
  if (cu_seqlens && row >= clamp_index(cu_seqlens[batch + 1], 0, p.total_q)) return;
  const int64_t entry = cu_seqlens ? 0 : batch;
  const int64_t position = cached_rows(p, batch) + (p.rotate_q_by_position ? t : 0);
  rotate_row(p, position, row_of<Element>(p.q, entry, row, head), row_of<Element>(p.q_rotated, entry, row, head), lane);
}

template <class Element>
__global__ void __launch_bounds__(32 * kAppendWarps)
    append_kernel(const __grid_constant__ AppendParams p, uint32_t key_rows, uint32_t query_rows) {
  ptx::launch_dependents();
  const int lane = threadIdx.x % 32;
  const uint32_t n = blockIdx.x * kAppendWarps + threadIdx.x / 32;
  if (n < p.batch && lane == 0) p.seqused_k_after[n] = static_cast<int32_t>(cached_rows(p, n) + p.seqlen_new);
  if (n < key_rows) {
    append_row<Element>(p, n, lane);
  } else if (n - key_rows < query_rows) {
    rotate_query<Element>(p, n - key_rows, lane);
  }
}

template <class Element>
void run_append(const AppendParams& p, cudaStream_t stream) {
  const int64_t key_rows = p.batch * p.seqlen_new * p.heads_kv;
  const int64_t query_rows = p.q_rotated.data ? p.batch * p.seqlen_q * p.heads_q : 0;
  const int64_t warps = std::max(key_rows + query_rows, p.batch);
  const int64_t blocks = (warps + kAppendWarps - 1) / kAppendWarps;
  launch("append", append_kernel<Element>, {dim3(grid_size(blocks)), dim3(32 * kAppendWarps)}, stream, p,
         static_cast<uint32_t>(key_rows), static_cast<uint32_t>(query_rows));
}

}  // namespace flash_ext::sm80
