#include <algorithm>

#include "kernels/common/backward/query_lists.h"
#include "kernels/common/mask/bits.cuh"
#include "kernels/common/mask/block_lists.cuh"
#include "kernels/launch.h"

namespace flash_ext {
namespace {

constexpr int kListThreads = 128, kKeysOfWarp = 16;

/// Writes the lists, each in one warp. A lane looks up the block of the list's key tile in one row of the mask.
__global__ void __launch_bounds__(kListThreads)
    query_lists_kernel(const __grid_constant__ BlockMaskParams mask, const __grid_constant__ QueryLists lists,
                       int key_tile_size) {
  const int64_t list = int64_t{blockIdx.x} * (kListThreads / 32) + threadIdx.x / 32;
  if (list >= lists.lists()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, parts = lists.query_tiles_of_block;
  const int key_tile = static_cast<int>(list % lists.key_tiles);
  const int64_t row_of_lists = list / lists.key_tiles;
  const int head_kv = static_cast<int>(row_of_lists % lists.heads_kv);
  const int batch = static_cast<int>(row_of_lists / lists.heads_kv);
  const int key_block = key_tile * key_tile_size / static_cast<int>(mask.block_n);
  const int rows = static_cast<int>(mask.num_row_blocks), num_blocks = static_cast<int>(mask.num_blocks);
  ListedQueries* const g_steps = lists.steps + list * lists.most_steps;
  int count = 0;
  for (int head = 0; head < lists.group; ++head) {
    const int32_t* const offsets =
        mask.offsets + batch * mask.offsets_batch_stride + (head_kv * lists.group + head) * mask.offsets_head_stride;
    bool last_found = false;  // whether this lane has found the block in its row of the last 32
    for (int first = 0; first < rows; first += 32) {
      const int row = first + lane;
      bool found = false;
      int bitmap = -1;
      if (row < rows) {
        const BlockEntries entries = entries_of_row(offsets, row, num_blocks);
        const int at = first_block_from(mask.indices, entries.begin, entries.end, key_block);
        found = at < entries.end && mask.indices[at] == key_block;
        if (found) bitmap = bitmap_of(mask, at);
      }
      last_found = found;
      const uint32_t all = __ballot_sync(~0u, found);
      if (found) {
        const int before = count + __popc(all & ((1u << lane) - 1)) * parts;
        for (int part = 0; part < min(parts, lists.query_tiles - row * parts); ++part)
          *reinterpret_cast<int4*>(g_steps + before + part) =
              make_int4(head, row * parts + part, bitmap < 0 ? -1 : bitmap * parts + part, 0);
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
  const int key_groups = static_cast<int>(mask.block_n) / kKeysOfWarp, words = static_cast<int>(mask.block_n) / 32;
  if (flat >= lists.num_visible * key_groups * 32) return;
  const int lane = static_cast<int>(flat % 32), key = static_cast<int>(flat / 32 % key_groups) * kKeysOfWarp + lane / 4;
  const int64_t tile = flat / 32 / key_groups;  // query tile, counted over all bitmaps; a bitmap consists of whole ones
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

QueryLists::QueryLists(const AttentionParams& p, int query_tile, int key_tile, void* memory)
    : batches(static_cast<int32_t>(p.blocks.offsets_batch_stride != 0 ? p.batch : 1)),
      heads_kv(static_cast<int32_t>(p.blocks.offsets_head_stride != 0 ? p.heads_kv : 1)),
      key_tiles(static_cast<int32_t>((p.seqlen_k + key_tile - 1) / key_tile)),
      group(static_cast<int32_t>(p.heads_q / p.heads_kv)),
      query_tiles(static_cast<int32_t>((p.seqlen_q + query_tile - 1) / query_tile)),
      query_tiles_of_block(static_cast<int32_t>(p.blocks.block_m / query_tile)),
      most_steps(p.blocks.num_row_blocks * query_tiles_of_block * group),
      num_visible(p.blocks.num_bitmaps * query_tiles_of_block) {
  const auto take = [&](auto*& taken, int64_t count) {
    taken = reinterpret_cast<std::remove_reference_t<decltype(taken)>>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(*taken)) + 255) / 256 * 256;
  };
  take(steps, lists() * most_steps);
  take(counts, lists());
  take(visible, num_visible * (p.blocks.block_n / kKeysOfWarp) * 32);
}

void make_query_lists(const AttentionParams& p, const QueryLists& lists, int key_tile, cudaStream_t stream) {
  const auto grid = [](int64_t count, int of_cta) { return grid_of((count + of_cta - 1) / of_cta); };
  launch("lists of queries", query_lists_kernel, {grid(lists.lists(), kListThreads / 32), dim3(kListThreads)}, stream,
         p.blocks, lists, key_tile);
  const int query_tile = static_cast<int>(p.blocks.block_m) / lists.query_tiles_of_block;
  launch("visible queries", visible_queries_kernel,
         {grid(lists.num_visible * (p.blocks.block_n / kKeysOfWarp) * 32, kListThreads), dim3(kListThreads)}, stream,
         p.blocks, lists, query_tile);
}

}  // namespace flash_ext
