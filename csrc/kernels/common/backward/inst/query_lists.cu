#include <algorithm>

#include "kernels/common/backward/query_lists.h"
#include "kernels/common/mask/bits.cuh"
#include "kernels/common/mask/block_lists.cuh"
#include "kernels/launch.h"

namespace flash_ext {
namespace {

constexpr int kListThreads = 128, kKeysOfWarp = 16;
constexpr int kAllVisible = -1, kNotListed = -2;  // for the bitmap of a block

/// What a row of the mask says of the blocks in which the key groups of a tile lie: their bitmaps, or one of the
/// constants above.
struct ListedBitmaps {
  int of_group[kListedKeyGroups];

  __device__ __forceinline__ bool any() const { return of_group[0] != kNotListed || of_group[1] != kNotListed; }
};

/// Looks up the blocks of a tile in one row, by one search: lists are ascending, so the second stands after the first.
__device__ __forceinline__ ListedBitmaps find_bitmaps(const BlockMaskParams& mask, const BlockEntries& entries,
                                                      const int (&blocks)[kListedKeyGroups]) {
  int at = first_block_from(mask.indices, entries.begin, entries.end, blocks[0]);
  const auto bitmap_at = [&](int block) {
    return at < entries.end && mask.indices[at] == block ? max(bitmap_of(mask, at), kAllVisible) : kNotListed;
  };
  const int first = bitmap_at(blocks[0]);
  if (blocks[1] == blocks[0]) return {first, first};
  if (first != kNotListed) ++at;
  return {first, bitmap_at(blocks[1])};
}

/// Writes the lists, each in one warp. A lane looks up the blocks of the list's key tile in one row of the mask. The
/// first CTA also writes the set of bits of hidden key groups.
__global__ void __launch_bounds__(kListThreads)
    query_lists_kernel(const __grid_constant__ BlockMaskParams mask, const __grid_constant__ QueryLists lists) {
  static_assert(kListThreads == kBitsOfKeyGroup, "each thread of a CTA writes one number of the set");
  if (blockIdx.x == 0) lists.visible[int64_t{lists.hidden()} * kBitsOfKeyGroup + threadIdx.x] = uint2{0, 0};
  const int64_t list = int64_t{blockIdx.x} * (kListThreads / 32) + threadIdx.x / 32;
  if (list >= lists.lists()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, parts = lists.query_tiles_of_block;
  const int key_tile = static_cast<int>(list % lists.key_tiles);
  const int64_t row_of_lists = list / lists.key_tiles;
  const int head_kv = static_cast<int>(row_of_lists % lists.heads_kv);
  const int batch = static_cast<int>(row_of_lists / lists.heads_kv);
  const int groups_of_block = lists.key_groups_of_block, first_group = key_tile * kListedKeyGroups;
  const int key_blocks[] = {first_group / groups_of_block, (first_group + 1) / groups_of_block};
  const int rows = static_cast<int>(mask.num_row_blocks), num_blocks = static_cast<int>(mask.num_blocks);
  ListedQueries* const g_steps = lists.steps + list * lists.most_steps;
  int count = 0;
  for (int head = 0; head < lists.group; ++head) {
    const int32_t* const offsets =
        mask.offsets + batch * mask.offsets_batch_stride + (head_kv * lists.group + head) * mask.offsets_head_stride;
    bool last_found = false;  // whether this lane has found a block of the tile in its row of the last 32
    for (int first = 0; first < rows; first += 32) {
      const int row = first + lane;
      ListedBitmaps bitmaps = {kNotListed, kNotListed};
      if (row < rows) bitmaps = find_bitmaps(mask, entries_of_row(offsets, row, num_blocks), key_blocks);
      const bool found = bitmaps.any();
      last_found = found;
      const uint32_t all = __ballot_sync(~0u, found);
      if (found) {
        const int before = count + __popc(all & ((1u << lane) - 1)) * parts;
        int visible[kListedKeyGroups], of_part[kListedKeyGroups];  // of_part: what a part adds
#pragma unroll
        for (int g = 0; g < kListedKeyGroups; ++g) {
          const int bitmap = bitmaps.of_group[g], group_of_block = first_group + g - key_blocks[g] * groups_of_block;
          visible[g] = bitmap >= 0            ? bitmap * parts * groups_of_block + group_of_block
                       : bitmap == kNotListed ? lists.hidden()
                                              : kAllVisible;
          of_part[g] = bitmap >= 0 ? groups_of_block : 0;
        }
        for (int part = 0; part < min(parts, lists.query_tiles - row * parts); ++part)
          *reinterpret_cast<int4*>(g_steps + before + part) =
              make_int4(head, row * parts + part, visible[0] + part * of_part[0], visible[1] + part * of_part[1]);
      }
      count += __popc(all) * parts;
    }
    // The last row of blocks may have fewer tiles than `parts`. Tiles that it lacks are not counted, and the next head
    // writes in their place.
    const int past_end = rows * parts - lists.query_tiles;
    if (past_end > 0 && __shfl_sync(~0u, static_cast<int>(last_found), (rows - 1) % 32)) count -= past_end;
  }
  if (lane == 0) lists.counts[list] = count;
}

/// Writes the bits of a query tile of a bitmap and 16 keys, each thread those of one lane: of its keys g and g + 8,
/// with g = lane / 4, in TransposedOrder.
__global__ void __launch_bounds__(kListThreads)
    visible_queries_kernel(const __grid_constant__ BlockMaskParams mask, const __grid_constant__ QueryLists lists,
                           int query_tile_size) {
  const int64_t flat = int64_t{blockIdx.x} * kListThreads + threadIdx.x;
  const int warps_of_block = static_cast<int>(mask.block_n) / kKeysOfWarp, words = static_cast<int>(mask.block_n) / 32;
  if (flat >= lists.num_visible * kBitsOfKeyGroup) return;
  const int lane = static_cast<int>(flat % 32);
  const int key = static_cast<int>(flat / 32 % warps_of_block) * kKeysOfWarp + lane / 4;
  // The query tile, counted over all bitmaps; a bitmap consists of whole ones.
  const int64_t tile = flat / 32 / warps_of_block;
  const int32_t* const g_rows = mask.bitmaps + (tile * query_tile_size + 2 * (lane % 4)) * words + key / 32;
  uint32_t visible[2] = {0, 0};
  for (int n = 0; n < query_tile_size / 8; ++n)
    for (int c = 0; c < 2; ++c) {
      const uint32_t bits = static_cast<uint32_t>(g_rows[(8 * n + c) * words]) >> key % 32;
      visible[0] |= (bits & 1u) << TransposedOrder::bit(n, c);
      visible[1] |= (bits >> 8 & 1u) << TransposedOrder::bit(n, c);
    }
  lists.visible[flat] = make_uint2(visible[0], visible[1]);
}

}  // namespace

QueryLists::QueryLists(const AttentionParams& p, int query_tile, void* memory)
    : batches(static_cast<int32_t>(p.blocks.offsets_batch_stride != 0 ? p.batch : 1)),
      heads_kv(static_cast<int32_t>(p.blocks.offsets_head_stride != 0 ? p.heads_kv : 1)),
      key_tiles(static_cast<int32_t>((p.seqlen_k + kListedKeys - 1) / kListedKeys)),
      group(static_cast<int32_t>(p.heads_q / p.heads_kv)),
      query_tiles(static_cast<int32_t>((p.seqlen_q + query_tile - 1) / query_tile)),
      query_tiles_of_block(static_cast<int32_t>(p.blocks.block_m / query_tile)),
      key_groups_of_block(static_cast<int32_t>(p.blocks.block_n / kListedGroupKeys)),
      most_steps(p.blocks.num_row_blocks * query_tiles_of_block * group),
      num_visible(p.blocks.num_bitmaps * query_tiles_of_block * key_groups_of_block) {
  const auto take = [&](auto*& taken, int64_t count) {
    taken = reinterpret_cast<std::remove_reference_t<decltype(taken)>>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(*taken)) + 255) / 256 * 256;
  };
  take(steps, lists() * most_steps);
  take(counts, lists());
  take(visible, (num_visible + 1) * kBitsOfKeyGroup);
}

void make_query_lists(const AttentionParams& p, const QueryLists& lists, cudaStream_t stream) {
  const auto grid = [](int64_t count, int of_cta) { return grid_of((count + of_cta - 1) / of_cta); };
  launch("lists of queries", query_lists_kernel, {grid(lists.lists(), kListThreads / 32), dim3(kListThreads)}, stream,
         p.blocks, lists);
  const int query_tile = static_cast<int>(p.blocks.block_m) / lists.query_tiles_of_block;
  launch("visible queries", visible_queries_kernel,
         {grid(lists.num_visible * kBitsOfKeyGroup, kListThreads), dim3(kListThreads)}, stream, p.blocks, lists,
         query_tile);
}

}  // namespace flash_ext
