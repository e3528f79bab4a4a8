// The kernel that writes a work list (common/scheduler/work_list.cuh). A CTA sorts a chunk of sequences, finds their
// sections and where each tile stands, and writes the entries. It counts the tiles of earlier chunks itself.
#include <climits>

#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext {
namespace {

constexpr int kListThreads = 1024, kListWarps = kListThreads / 32;
constexpr int kSequencesOfThread = kWorkListChunk / kListThreads;  // neighbours

/// What the threads share of a chunk of sequences, which stay in their order.
struct ChunkState {
  uint64_t keys[kWorkListChunk];
  int64_t tiles_before[kWorkListChunk + 1];
  uint16_t section_begin[kWorkListChunk], section_end[kWorkListChunk];  // end: at the first sequence of the section
  int64_t warp_sums[kListWarps];
};

struct SequenceRows {
  int64_t tiles, other_rows;

  __device__ __forceinline__ SequenceRows(const AttentionParams& p, WorkListSide side, int block, int sequence) {
    const Sequence lengths(p, sequence, 0);
    const bool keys = side == WorkListSide::kKeys;
    tiles = tiles_of_rows(keys ? lengths.seqlen_k : lengths.seqlen_q, block);
    other_rows = keys ? lengths.seqlen_q : lengths.seqlen_k;
  }
};

/// Sums of `value` over the threads before this one, and over all threads.
struct BlockSum {
  int64_t before, all;

  __device__ __forceinline__ BlockSum(int64_t value, int64_t (&warp_sums)[kListWarps]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    int64_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    before = sum - value;
    all = 0;
#pragma unroll
    for (int k = 0; k < kListWarps; ++k) {
      if (k < warp) before += warp_sums[k];
      all += warp_sums[k];
    }
    __syncthreads();
  }
};

/// Sorts bitonically, the largest first. `size` is a power of two.
__device__ __forceinline__ void sort_keys(uint64_t* keys, int size) {
  for (int run = 2; run <= size; run *= 2)
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int k = threadIdx.x; k < size / 2; k += kListThreads) {
        const int low = 2 * k - (k & (stride - 1)), high = low + stride;
        const uint64_t a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
}

/// Computes and sorts the keys of the sequences [first, first + size).
__device__ __forceinline__ void find_keys(const AttentionParams& p, WorkListSide side, int block, int first, int size,
                                          ChunkState& s) {
  int padded = 1;
  while (padded < size) padded *= 2;
  for (int k = threadIdx.x; k < padded; k += kListThreads) {
    uint64_t key = 0;
    if (k < size) {
      const SequenceRows rows(p, side, block, first + k);
      key = sequence_key(rows.tiles, rows.other_rows, k);
    }
    s.keys[k] = key;
  }
  __syncthreads();
  bool sorted = true;
  for (int k = threadIdx.x; k + 1 < padded; k += kListThreads) sorted = sorted && s.keys[k] >= s.keys[k + 1];
  if (!__syncthreads_and(sorted)) sort_keys(s.keys, padded);
}

/// Finds the tiles and the sections of the sorted sequences. Returns the number of tiles of all.
__device__ __forceinline__ int64_t find_sections(const WorkOrder& order, int size, ChunkState& s) {
  const int first = static_cast<int>(threadIdx.x) * kSequencesOfThread;
  const int end = min(first + kSequencesOfThread, size);
  int64_t tiles = 0, rows = 0;
  for (int k = first; k < end; ++k) tiles += tiles_of_key(s.keys[k]), rows += other_rows_of_key(s.keys[k]);
  const BlockSum tiles_sum(tiles, s.warp_sums), rows_sum(rows, s.warp_sums);

  int64_t tiles_before = tiles_sum.before, rows_before = rows_sum.before;
  int begin = 0;
  for (int k = first; k < end; ++k) {
    const uint64_t key = s.keys[k];
    s.tiles_before[k] = tiles_before;
    if (k > 0 && begins_section(order, key, s.keys[k - 1], rows_before)) begin = k;
    s.section_begin[k] = static_cast<uint16_t>(begin);
    tiles_before += tiles_of_key(key);
    rows_before += other_rows_of_key(key);
  }
  if (threadIdx.x == 0) s.tiles_before[size] = tiles_sum.all;
  // A thread's first sequences may continue a section that began with a sequence of an earlier thread.
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int latest = begin;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, latest, step);
    if (lane >= step) latest = max(latest, other);
  }
  if (lane == 31) s.warp_sums[warp] = latest;
  __syncthreads();
  int before = __shfl_up_sync(~0u, latest, 1);
  if (lane == 0) before = 0;
  for (int k = 0; k < warp; ++k) before = max(before, static_cast<int>(s.warp_sums[k]));
  for (int k = first; k < end && s.section_begin[k] == 0; ++k) s.section_begin[k] = static_cast<uint16_t>(before);
  __syncthreads();
  for (int k = first; k < end; ++k)
    if (k + 1 == size || s.section_begin[k + 1] != s.section_begin[k])
      s.section_end[s.section_begin[k]] = static_cast<uint16_t>(k + 1);
  __syncthreads();
  return tiles_sum.all;
}

/// Finds the sequence of a tile, by the tile's number among all tiles of the chunk.
__device__ __forceinline__ int sequence_of_tile(const ChunkState& s, int size, int64_t tile) {
  int low = 0, high = size;  // the last sequence whose first tile is at or before it
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.tiles_before[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ int64_t tiles_before_chunk(const AttentionParams& p, WorkListSide side, int block, int first,
                                                      ChunkState& s) {
  if (first == 0) return 0;
  int64_t tiles = 0;
  for (int k = threadIdx.x; k < first; k += kListThreads) tiles += SequenceRows(p, side, block, k).tiles;
  return BlockSum(tiles, s.warp_sums).all;
}

__global__ void __launch_bounds__(kListThreads)
    work_list_kernel(const __grid_constant__ AttentionParams p, WorkListSide side, int64_t most_entries,
                     const __grid_constant__ WorkList list) {
  extern __shared__ __align__(16) char shared[];
  auto& s = *reinterpret_cast<ChunkState*>(shared);
  ptx::launch_dependents();
  const WorkOrder& order = list.order;
  const int first = static_cast<int>(blockIdx.x) * kWorkListChunk;
  const int size = min(static_cast<int>(p.batch) - first, kWorkListChunk);
  const int64_t base = tiles_before_chunk(p, side, order.block, first, s);
  find_keys(p, side, order.block, first, size, s);
  const int64_t tiles = find_sections(order, size, s);
  if (blockIdx.x == gridDim.x - 1) {
    if (threadIdx.x == 0) list.head->taken = 0;
    for (int64_t index = (base + tiles) * order.bundles + threadIdx.x; index < most_entries; index += kListThreads)
      *reinterpret_cast<int4*>(list.entries + index) = make_int4(0, kNoTile, 0, 0);
  }
  for (int64_t tile = threadIdx.x; tile < tiles; tile += kListThreads) {
    const int k = sequence_of_tile(s, size, tile), begin = s.section_begin[k], end = s.section_end[begin];
    const uint64_t key = s.keys[k];
    const int32_t rank = static_cast<int32_t>(tile - s.tiles_before[k]);
    const int64_t section = (base + s.tiles_before[begin]) * order.bundles;
    const int64_t among_tiles = index_among_tiles(s.keys, s.tiles_before, begin, end, k, rank);
    const int32_t tiles_here = tiles_of_key(key);
    int4 entry = make_int4(first + sequence_of_key(key), tile_of_rank(order, tiles_here, rank), 0, tiles_here);
    for (int bundle = 0; bundle < order.bundles; ++bundle, entry.z += order.bundle_heads) {
      const int64_t index = section + index_in_section(order, key, rank, among_tiles, bundle);
      if (index < most_entries) *reinterpret_cast<int4*>(list.entries + index) = entry;
    }
  }
}

}  // namespace

void fill_work_list(const AttentionParams& p, const WorkListPlan& plan, const WorkList& list, cudaStream_t stream) {
  if (!plan.listed) return;
  const int64_t chunks = (p.batch + kWorkListChunk - 1) / kWorkListChunk;
  launch("work list", work_list_kernel, {grid_of(chunks), dim3(kListThreads), sizeof(ChunkState)}, stream, p, plan.side,
         plan.most_entries(), list);
}

}  // namespace flash_ext
