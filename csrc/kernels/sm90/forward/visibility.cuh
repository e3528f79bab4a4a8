// The kernels that convert masks to bits before the forward (visibility.h).
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/common/mask/visibility.cuh"
#include "kernels/launch.h"
#include "visibility.h"

namespace flash_ext::sm90 {

/// What an entry of ForwardVisibility::entries stands for: 64 queries of a head and a group of keys.
struct VisibilityEntry {
  int batch, head, row_group, group;

  __device__ __forceinline__ VisibilityEntry(const VisibilitySizes& sizes, int64_t row, int64_t group)
      : batch(static_cast<int>(row / sizes.row_groups / sizes.heads)),
        head(static_cast<int>(row / sizes.row_groups % sizes.heads)),
        row_group(static_cast<int>(row % sizes.row_groups)),
        group(static_cast<int>(group)) {}
};

/// A row of PairBits: a query's bits for 64 keys. `low`, `high`: its bits for 32 keys each, in the order of the keys.
__device__ __forceinline__ PairBits::Row pair_bits(uint32_t low, uint32_t high) {
  uint32_t parts[4];
#pragma unroll
  for (int t = 0; t < 4; ++t) parts[t] = QuadOrder::part(low, t) | QuadOrder::part(high, t) << 8;
  return {parts[0] | parts[1] << 16, parts[2] | parts[3] << 16};
}

constexpr int kMissing = -2, kFullBlock = -1;

/// A block of a block mask: where it stands in the lists, and its bitmap, or kMissing, or kFullBlock.
struct FoundBlock {
  int entry, bitmap;
};

__device__ __forceinline__ FoundBlock look_up(const BlockMaskParams& p, const VisibilityEntry& at, int row_block,
                                              int key_block) {
  constexpr FoundBlock kNone = {INT_MAX, kMissing};
  if (row_block >= p.num_row_blocks) return kNone;
  const BlockEntries row = entries_of_row(block_offsets(p, at), row_block, static_cast<int>(p.num_blocks));
  const int found = first_block_from(p.indices, row.begin, row.end, key_block);
  if (found >= row.end || p.indices[found] != key_block) return kNone;
  return {found, max(bitmap_of(p, found), kFullBlock)};
}

/// Returns which of the keys [key, + 32) a row of the block mask leaves, as bits. Lowers `entry` to the entry of their
/// block.
__device__ __forceinline__ uint32_t block_word(const BlockMaskParams& p, const VisibilityEntry& at, int row, int key,
                                               int& entry) {
  const int block_m = static_cast<int>(p.block_m), block_n = static_cast<int>(p.block_n);
  const FoundBlock found = look_up(p, at, row / block_m, key / block_n);
  entry = min(entry, found.entry);
  if (found.bitmap < 0) return found.bitmap == kFullBlock ? ~0u : 0u;
  return bitmap_word(p, block_m, block_n, found.bitmap, row, key);
}

/// Writes the two constant PairBits. All CTAs call it; the first one writes.
__device__ __forceinline__ void write_constants(PairBits* bits) {
  if (blockIdx.x > 0 || threadIdx.x >= kWarpgroupRows) return;
  bits[kNonePairs].rows[threadIdx.x] = {0, 0};
  bits[kAllPairs].rows[threadIdx.x] = {~0u, ~0u};
}

/// The index in ForwardVisibility::bits of the PairBits of a group of queries and a group of keys. Without by_lists
/// each pair of groups has its own. With by_lists the lists of the block mask give the order: each block has PairBits
/// for all pairs of groups that it may touch. Where several blocks touch a pair of groups, the first of them in the
/// lists, `entry`, has its PairBits.
__device__ __forceinline__ int64_t own_pairs(const VisibilitySizes& sizes, const VisibilityEntry& at, int64_t row,
                                             int entry, int64_t num_blocks) {
  if (!sizes.by_lists) return kFirstPairs + row * sizes.groups + at.group;
  const int64_t block = (row / sizes.row_groups) * num_blocks + entry;
  const int64_t of_rows = block * sizes.touched_rows + at.row_group % sizes.touched_rows;
  return kFirstPairs + of_rows * sizes.touched_keys + at.group % sizes.touched_keys;
}

constexpr int kPairThreads = 256, kPairGroups = kPairThreads / kWarpgroupRows;  // of keys

/// Writes bits and entries from a boolean mask, a block mask or both, pair by pair. A warp has 32 queries and one group
/// of keys.
static __global__ void __launch_bounds__(kPairThreads)
    visible_pairs_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ VisibilitySizes sizes,
                         const __grid_constant__ ForwardVisibility to) {
  __shared__ bool s_some[2][kPairGroups], s_all[2][kPairGroups];
  __shared__ int s_entry[2][kPairGroups];
  write_constants(to.bits);
  const int64_t parts = (sizes.groups + kPairGroups - 1) / kPairGroups;
  const int half = static_cast<int>(threadIdx.x) / 32 % 2, in_block = static_cast<int>(threadIdx.x) / kWarpgroupRows;
  const VisibilityEntry at(sizes, blockIdx.x / parts, blockIdx.x % parts * kPairGroups + in_block);
  const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
  const int in_group = static_cast<int>(threadIdx.x) % kWarpgroupRows, row = at.row_group * kWarpgroupRows + in_group;
  const int first_key = at.group * kKeyGroup;
  // A mask that is the same for all queries has one group of rows, even if the sequence has fewer queries than that.
  const bool exists = row < seqlen_q || (p.mask.row_stride == 0 && !p.blocks.offsets);
  uint32_t words[2] = {0, 0};
  int entry = INT_MAX;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int key = first_key + 32 * k;
    if (!exists || key >= seqlen_k) continue;
    words[k] = seqlen_k - key < 32 ? (1u << (seqlen_k - key)) - 1 : ~0u;
    if (p.mask.data) words[k] &= mask_word(MaskRows(p.mask, at.batch, at.head), row, key, seqlen_k);
    if (p.blocks.offsets) words[k] &= block_word(p.blocks, at, row, key, entry);
  }
  const int keys = min(max(seqlen_k - first_key, 0), kKeyGroup);
  const bool some = __any_sync(~0u, words[0] | words[1]);
  const bool all = __all_sync(~0u, !exists || __popc(words[0]) + __popc(words[1]) == keys);
  entry = __reduce_min_sync(~0u, entry);
  if (in_group % 32 == 0) s_some[half][in_block] = some, s_all[half][in_block] = all, s_entry[half][in_block] = entry;
  __syncthreads();
  if (at.group >= sizes.groups) return;
  const int64_t own =
      own_pairs(sizes, at, blockIdx.x / parts, min(s_entry[0][in_block], s_entry[1][in_block]), p.blocks.num_blocks);
  const bool none_here = !s_some[0][in_block] && !s_some[1][in_block],
             all_here = s_all[0][in_block] && s_all[1][in_block];
  const int64_t found_entry = none_here ? kNonePairs : all_here ? kAllPairs : own;
  if (found_entry == own) to.bits[own].rows[in_group] = pair_bits(words[0], words[1]);
  if (in_group == 0) to.row(at.batch, at.head, at.row_group)[at.group] = static_cast<int>(found_entry);
}

constexpr int kEntryThreads = 256;

__device__ __forceinline__ int64_t flat_thread() {
  return static_cast<int64_t>(blockIdx.x) * kEntryThreads + threadIdx.x;
}

/// Writes the entries from the lists of a block mask whose blocks consist of whole groups.
static __global__ void __launch_bounds__(kEntryThreads)
    block_entries_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ VisibilitySizes sizes,
                         const __grid_constant__ ForwardVisibility to) {
  write_constants(to.bits);
  if (flat_thread() >= sizes.entries) return;
  const VisibilityEntry at(sizes, flat_thread() / sizes.groups, flat_thread() % sizes.groups);
  const int block_m = static_cast<int>(p.blocks.block_m), block_n = static_cast<int>(p.blocks.block_n);
  const int row = at.row_group * kWarpgroupRows, key = at.group * kKeyGroup;
  const int64_t bitmap = look_up(p.blocks, at, row / block_m, key / block_n).bitmap;
  const int row_groups = block_m / kWarpgroupRows, groups = block_n / kKeyGroup;
  const int64_t pairs = (bitmap * row_groups + row % block_m / kWarpgroupRows) * groups + key % block_n / kKeyGroup;
  to.row(at.batch, at.head, at.row_group)[at.group] = bitmap == kMissing     ? kNonePairs
                                                      : bitmap == kFullBlock ? kAllPairs
                                                                             : kFirstPairs + static_cast<int>(pairs);
}

/// Writes the bits of the bitmaps of a block mask. A thread has a row of a bitmap and a group of keys.
static __global__ void __launch_bounds__(kEntryThreads)
    bitmap_pairs_kernel(const __grid_constant__ BlockMaskParams blocks, PairBits* g_bits) {
  const int64_t groups = blocks.block_n / kKeyGroup;
  const int64_t group = flat_thread() % groups, row = flat_thread() / groups;  // of all bitmaps
  if (row >= blocks.num_bitmaps * blocks.block_m) return;
  const uint32_t low = static_cast<uint32_t>(blocks.bitmaps[(row * groups + group) * 2]);
  const uint32_t high = static_cast<uint32_t>(blocks.bitmaps[(row * groups + group) * 2 + 1]);
  g_bits[kFirstPairs + row / kWarpgroupRows * groups + group].rows[row % kWarpgroupRows] = pair_bits(low, high);
}

/// Launches the kernels that convert the masks of a call. Bits and entries lie in `memory`, which has
/// VisibilitySizes::bytes().
inline ForwardVisibility find_visibility(const AttentionParams& p, char* memory, cudaStream_t stream) {
  const VisibilitySizes sizes(p);
  const ForwardVisibility found = sizes.views(memory);
  if (sizes.entries == 0) return found;
  const auto grid = [](int64_t threads, int64_t of_cta) { return grid_of((threads + of_cta - 1) / of_cta); };
  if (sizes.by_pairs) {
    const dim3 blocks = grid_of(sizes.entries / sizes.groups * ((sizes.groups + kPairGroups - 1) / kPairGroups));
    launch("sm90/visible_pairs", visible_pairs_kernel, {blocks, dim3(kPairThreads)}, stream, p, sizes, found);
  } else {
    launch("sm90/block_entries", block_entries_kernel, {grid(sizes.entries, kEntryThreads), dim3(kEntryThreads)},
           stream, p, sizes, found);
    const int64_t rows = p.blocks.num_bitmaps * p.blocks.block_m * (p.blocks.block_n / kKeyGroup);
    launch("sm90/bitmap_pairs", bitmap_pairs_kernel, {grid(rows, kEntryThreads), dim3(kEntryThreads)}, stream, p.blocks,
           found.bits);
  }
  return found;
}

}  // namespace flash_ext::sm90
