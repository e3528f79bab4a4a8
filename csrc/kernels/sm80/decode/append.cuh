// Appending to a cache: rows of k (rotated by their positions) and of v are written after those in use, and q is
// rotated into q_rotated:
//
//   (x, y) -> (x cos - y sin, x sin + y cos)     for the pairs of the first rotary_dim elements
//
// A warp owns one row, of k and v or of q. One thread of each sequence stores how many rows are in use afterwards.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/divisor.h"
#include "kernels/common/mask/tile_range.h"
#include "kernels/common/scheduler/tile_numbers.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext::sm80 {

constexpr int kAppendWarps = 4;

struct RowOfHead {
  int batch, row, head;
};

/// (batch, rows, heads), the last one fastest, and the divisors that take a flat number apart.
struct RowsOfHeads {
  int64_t count;
  LongDivisor rows, heads;

  RowsOfHeads(int64_t batch, int64_t rows, int64_t heads) : count(batch * rows * heads), rows(rows), heads(heads) {}

  __device__ __forceinline__ RowOfHead locate(int64_t n) const {
    const uint64_t row = heads.quotient(n), batch = rows.quotient(row);
    return {static_cast<int>(batch), static_cast<int>(row - batch * rows.value),
            static_cast<int>(n - row * heads.value)};
  }
};

/// The number of rows of a sequence that the cache held before the call, clamped so that the new rows find room.
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

/// Appends the n-th row of k and v, over (batch, seqlen_new, heads_kv).
template <class Element>
__device__ __forceinline__ void append_row(const AppendParams& p, const RowsOfHeads& rows, int64_t n, int lane) {
  const RowOfHead location = rows.locate(n);
  const int64_t row = cached_rows(p, location.batch) + location.row;
  const Element* k = row_of<Element>(p.k, location.batch, location.row, location.head);
  Element* k_cache = cache_row_of<Element>(p, p.k_cache, location.batch, row, location.head);
  if (p.cos) {
    rotate_row(p, row, k, k_cache, lane);
  } else {
    copy_row(k, k_cache, 0, p.head_dim, lane);
  }
  copy_row(row_of<Element>(p.v, location.batch, location.row, location.head),
           cache_row_of<Element>(p, p.v_cache, location.batch, row, location.head), 0, p.head_dim_v, lane);
}

/// Counts how many of the first `count` numbers, which do not decrease, are at most `row`. One warp calls it; its lanes
/// look at 32 numbers at a time.
__device__ __forceinline__ int count_up_to(const int32_t* numbers, int count, int row, int lane) {
  int low = 0, high = count;
  while (low < high) {
    const int step = (high - low + 31) / 32, at = low + lane * step;
    const int found = __popc(__ballot_sync(~0u, at < high && numbers[at] <= row));
    high = min(low + found * step, high);
    low += found > 0 ? (found - 1) * step + 1 : 0;
  }
  return low;
}

/// Rotates the n-th row of q, over (batch, seqlen_q, heads_q). For packed sequences, n counts the rows in memory:
/// seqlen_q may be as long as all sequences together.
template <class Element>
__device__ __forceinline__ void rotate_query(const AppendParams& p, const RowsOfHeads& rows, int64_t n, int lane) {
  const RowOfHead location = rows.locate(n);
  int batch = location.batch, t = location.row;
  if (const int32_t* const cu_seqlens = p.seq.cu_seqlens_q) {
    batch = count_up_to(cu_seqlens, static_cast<int>(p.batch), location.row, lane) - 1;
    if (batch < 0 || location.row >= cu_seqlens[batch + 1]) return;
    t -= cu_seqlens[batch];
  }
  const int64_t position = cached_rows(p, batch) + (p.rotate_q_by_position ? t : 0);
  rotate_row(p, position, row_of<Element>(p.q, location.batch, location.row, location.head),
             row_of<Element>(p.q_rotated, location.batch, location.row, location.head), lane);
}

template <class Element>
__global__ void __launch_bounds__(32 * kAppendWarps)
    append_kernel(const __grid_constant__ AppendParams p, const __grid_constant__ RowsOfHeads keys,
                  const __grid_constant__ RowsOfHeads queries) {
  ptx::launch_dependents();
  const int lane = threadIdx.x % 32;
  const int64_t n = int64_t{blockIdx.x} * kAppendWarps + threadIdx.x / 32;
  if (n < p.batch && lane == 0) p.seqused_k_after[n] = static_cast<int32_t>(cached_rows(p, n) + p.seqlen_new);
  if (n < keys.count) {
    append_row<Element>(p, keys, n, lane);
  } else if (n - keys.count < queries.count) {
    rotate_query<Element>(p, queries, n - keys.count, lane);
  }
}

template <class Element>
void run_append(const AppendParams& p, cudaStream_t stream) {
  const RowsOfHeads keys(p.batch, p.seqlen_new, p.heads_kv);
  const bool packed = p.seq.cu_seqlens_q != nullptr;
  const int64_t entries = packed ? 1 : p.batch, rows = packed ? p.total_q : p.seqlen_q;
  const RowsOfHeads queries(entries, p.q_rotated.data ? rows : 0, p.heads_q);
  const int64_t warps = std::max(keys.count + queries.count, p.batch);
  const int64_t ctas = (warps + kAppendWarps - 1) / kAppendWarps;
  launch("append", append_kernel<Element>, {grid_of(ctas), dim3(32 * kAppendWarps)}, stream, p, keys, queries);
}

}  // namespace flash_ext::sm80
