// Block lists of masks, of intervals of keys (common/block_lists/interval_lists.h) and transposed
// (common/block_lists/transposed_lists.h), by three launches each:
//
//   a warp counts the blocks of a row | a CTA turns counts into offsets | a warp writes the entries of a row
//
// A row of the transpose is a column of the mask. A CTA computes one, each warp from a part of the rows, because a
// look-up is a chain of dependent loads. Bitmaps need no offsets and are written beside the counts.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/block_lists/interval_lists.h"
#include "kernels/common/block_lists/transposed_lists.h"
#include "kernels/launch.h"

namespace flash_ext::sm80 {

constexpr int kBlockListThreads = 128;
constexpr int kOffsetThreads = 1024;
constexpr int kColumnWarps = 8;  // of a CTA of the transpose
constexpr int kColumnThreads = kColumnWarps * Lanes::kCount;

/// The number of this warp in the grid.
__device__ __forceinline__ int64_t warp_of_grid() {
  return (static_cast<int64_t>(blockIdx.x) * kBlockListThreads + threadIdx.x) / Lanes::kCount;
}

static __global__ void __launch_bounds__(kBlockListThreads, 1)
    count_blocks_kernel(const __grid_constant__ IntervalListsParams p) {
  const int64_t row = warp_of_grid();
  if (row < p.batch * p.rows) count_blocks(p, static_cast<int>(row), Lanes());
}

/// The part of the rows of a mask that this warp looks at, and how many of them list the CTA's column.
class ColumnPart {
 public:
  __device__ __forceinline__ ColumnPart(const TransposedListsParams& p, int column, int32_t (&counts)[kColumnWarps])
      : counts_(counts), warp_(static_cast<int>(threadIdx.x) / Lanes::kCount), rows_(rows_of(p, warp_)) {
    const int count = count_rows(p, column, rows_, Lanes());
    if (Lanes().index == 0) counts[warp_] = count;
    __syncthreads();
  }
  __device__ __forceinline__ RowRange rows() const { return rows_; }
  /// How many rows of the parts before this one list the column.
  __device__ __forceinline__ int before() const { return sum_of(warp_); }
  __device__ __forceinline__ int of_all() const { return sum_of(kColumnWarps); }

 private:
  __device__ __forceinline__ static RowRange rows_of(const TransposedListsParams& p, int warp) {
    const int share = (p.rows + kColumnThreads - 1) / kColumnThreads * Lanes::kCount;
    return {min(warp * share, p.rows), min((warp + 1) * share, p.rows)};
  }
  __device__ __forceinline__ int sum_of(int parts) const {
    int sum = 0;
    for (int part = 0; part < parts; ++part) sum += counts_[part];
    return sum;
  }

  const int32_t (&counts_)[kColumnWarps];
  const int warp_;
  const RowRange rows_;
};

static __global__ void __launch_bounds__(kColumnThreads, 1)
    count_rows_kernel(const __grid_constant__ TransposedListsParams p) {
  __shared__ int32_t counts[kColumnWarps];
  const int64_t columns = int64_t{p.batch} * p.heads * p.columns;
  if (blockIdx.x < columns) {
    const int column = static_cast<int>(blockIdx.x);
    const ColumnPart part(p, column, counts);
    if (threadIdx.x == 0) p.transposed_offsets[place_of_offset(p, column)] = part.of_all();
  } else {
    const int64_t bit_tile = (blockIdx.x - columns) * kColumnWarps + threadIdx.x / Lanes::kCount;
    if (bit_tile < num_bit_tiles(p)) transpose_bit_tile(p, bit_tile, Lanes());
  }
}

/// Turns counts into offsets. `offsets` holds `total` counts: (lists, rows + 1), of which the last of each list counts
/// as 0. A count becomes the begin of its row, and the last of a list the end of that list.
static __global__ void __launch_bounds__(kOffsetThreads)
    offsets_kernel(int32_t* offsets, int total, int rows, int max_blocks) {
  __shared__ int64_t sums[kOffsetThreads];  // of a thread's counts, then of the counts of all threads up to it
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t share = (int64_t{total} + kOffsetThreads - 1) / kOffsetThreads;
  const int begin = static_cast<int>(min(thread * share, int64_t{total}));
  const int end = static_cast<int>(min(begin + share, int64_t{total}));
  const auto count = [&](int place) { return place % (rows + 1) == rows ? 0 : offsets[place]; };
  int64_t sum = 0;
  for (int place = begin; place < end; ++place) sum += count(place);
  sums[thread] = sum;
  __syncthreads();
  for (int distance = 1; distance < kOffsetThreads; distance *= 2) {
    const int64_t before = thread >= distance ? sums[thread - distance] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  int64_t start = sums[thread] - sum;
  for (int place = begin; place < end; ++place) {
    const int blocks = count(place);
    offsets[place] = static_cast<int32_t>(min(start, int64_t{max_blocks}));
    start += blocks;
  }
}

/// Zeroes the entries past the last block, by all threads of the grid.
__device__ __forceinline__ void zero_entries(int32_t* indices, int32_t* bitmap_ids, int64_t end, int64_t max_blocks) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t n = end + thread; n < max_blocks; n += static_cast<int64_t>(gridDim.x) * blockDim.x)
    indices[n] = bitmap_ids[n] = 0;
}

static __global__ void __launch_bounds__(kBlockListThreads, 1)
    write_blocks_kernel(const __grid_constant__ IntervalListsParams p) {
  const int64_t row = warp_of_grid(), rows = p.batch * p.rows;
  if (row < rows) write_blocks(p, static_cast<int>(row), Lanes());
  zero_entries(p.indices, p.bitmap_ids, rows > 0 ? p.offsets[rows + p.batch - 1] : 0, p.max_blocks);
}

static __global__ void __launch_bounds__(kColumnThreads, 1)
    write_rows_kernel(const __grid_constant__ TransposedListsParams p) {
  __shared__ int32_t counts[kColumnWarps];
  const int64_t heads = int64_t{p.batch} * p.heads, columns = heads * p.columns;
  if (blockIdx.x < columns) {
    const int column = static_cast<int>(blockIdx.x);
    const ColumnPart part(p, column, counts);
    write_rows(p, column, part.rows(), part.before(), Lanes());
  }
  zero_entries(p.transposed_indices, p.transposed_bitmap_ids,
               columns > 0 ? p.transposed_offsets[columns + heads - 1] : 0, p.max_blocks);
}

/// A grid with this many warps.
inline LaunchShape warps_of_block_lists(int64_t warps) {
  constexpr int64_t kWarps = kBlockListThreads / Lanes::kCount;
  return {grid_of((warps + kWarps - 1) / kWarps), dim3(kBlockListThreads)};
}

inline void make_offsets(int32_t* offsets, int64_t lists, int64_t rows, int64_t max_blocks, cudaStream_t stream) {
  if (lists == 0) return;
  launch("offsets of blocks", offsets_kernel, {dim3(1), dim3(kOffsetThreads)}, stream, offsets,
         static_cast<int>(lists * (rows + 1)), static_cast<int>(rows), static_cast<int>(max_blocks));
}

inline void run_interval_block_lists(const IntervalListsParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.rows;
  launch("blocks of intervals", count_blocks_kernel, warps_of_block_lists(rows), stream, p);
  make_offsets(p.offsets, p.batch, p.rows, p.max_blocks, stream);
  launch("lists of intervals", write_blocks_kernel, warps_of_block_lists(std::max<int64_t>(rows, 1)), stream, p);
}

inline void run_block_lists_transposed(const TransposedListsParams& p, cudaStream_t stream) {
  const int64_t heads = int64_t{p.batch} * p.heads, columns = heads * p.columns;
  const auto ctas = [](int64_t count) { return LaunchShape{grid_of(count), dim3(kColumnThreads)}; };
  const int64_t bit_tiles = p.num_bitmaps * (p.block_m / 32) * (p.block_n / 32);
  launch("rows of columns", count_rows_kernel, ctas(columns + (bit_tiles + kColumnWarps - 1) / kColumnWarps), stream,
         p);
  make_offsets(p.transposed_offsets, heads, p.columns, p.max_blocks, stream);
  launch("lists of columns", write_rows_kernel, ctas(std::max<int64_t>(columns, 1)), stream, p);
}

}  // namespace flash_ext::sm80
