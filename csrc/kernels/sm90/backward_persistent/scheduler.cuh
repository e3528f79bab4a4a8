// The table of a call's key tiles, in the order of the schedule, as a persistent CTA needs them. The kernel of row
// terms fills it, one thread per tile: to find out what a tile needs takes a warp as long as a step and a half.
#pragma once

#include "kernels/common/backward/dq_zeroing.cuh"
#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/backward/non_finite_rows.cuh"
#include "kernels/sm90/common/backward/option_parts.cuh"
#include "kernels/sm90/common/backward/scheduler.cuh"

namespace flash_ext::sm90 {

/// Only the warps that load nothing zero sums.
template <class Config>
using BackwardPersistentDqZeroing = DqZeroing<Config::kBlockM, Config::kHeadDim, Config::kHeadDim / kDqPlaneColumns,
                                              kWarpgroupWarps - Config::kLoadingWarps>;

/// The tiles of row terms that the steps of a key tile touch.
struct RowTermTiles {
  int first, count;

  template <class Config>
  __device__ __forceinline__ explicit RowTermTiles(const BackwardWorkTile<Config>& work_tile) {
    constexpr int kBlockM = Config::kBlockM;
    const int begin = work_tile.tiles.begin * kBlockM,
              end = min(work_tile.tiles.end * kBlockM, work_tile.sequence.seqlen_q);
    first = (work_tile.skipped + begin) / kBlockM;
    count = begin < end ? (work_tile.skipped + end + kBlockM - 1) / kBlockM - first : 0;
  }
};

/// Like find_large_lse(), for all warpgroups. One warp calls it, after the wait for row terms.
template <class Config>
__device__ __forceinline__ void find_large_lse_of_all(const BackwardWorkspace& workspace,
                                                      BackwardWorkTile<Config>& work_tile, int lane) {
  const RowTermTiles rows(work_tile);
  if (!__any_sync(~0u, finds_large_lse(workspace, work_tile.workspace_tile + rows.first, rows.count, work_tile.heads,
                                       lane, 32)))
    return;
  work_tile.large = true;
#pragma unroll
  for (TileSpan& seen : work_tile.groups) seen.full_begin = seen.full_end = seen.end;
  __syncwarp();
}

/// Finds which keys of a tile a per-key bias or mask leaves visible: `visible` has the bits of the first head. If no
/// head sees a key, the tile has no steps; if some key is hidden, and Q or dO may hold Inf or NaN, no step is full. One
/// warp calls it, as above.
template <class Config>
__device__ __forceinline__ void find_visible_keys(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                  BackwardWorkTile<Config>& work_tile,
                                                  uint32_t (&visible)[Config::kBlockN / 32], int lane) {
  Sequence sequence = work_tile.sequence;
  const int first_key = work_tile.first_key + lane;
  const int heads = p.mask.head_stride || p.bias.head_stride ? work_tile.heads : min(work_tile.heads, 1);
  bool sees = false, hides = false;
#pragma unroll 1
  for (int head = 0; head < heads; ++head, ++sequence.head) {
#pragma unroll
    for (int word = 0; word < Config::kBlockN / 32; ++word) {
      const int key = first_key + 32 * word;
      const bool exists = key < sequence.seqlen_k;
      const bool hidden = exists && key_bias_of<false>(p, sequence, key) == -INFINITY;
      sees |= exists && !hidden;
      hides |= hidden;
      const uint32_t bits = __ballot_sync(~0u, !hidden);
      if (head == 0) visible[word] = bits;
    }
  }
  if (!__any_sync(~0u, sees)) {
    work_tile.tiles.end = work_tile.tiles.begin;
  } else if (__any_sync(~0u, hides)) {
    const RowTermTiles rows(work_tile);
    if (__any_sync(~0u, finds_non_finite(workspace, work_tile.workspace_tile + rows.first, rows.count, work_tile.heads,
                                         lane, 32)))
      work_tile.tiles.full_begin = work_tile.tiles.full_end = work_tile.tiles.end;
  }
  __syncwarp();
}

/// Like find_large_lse_of_all(), for the tiles of a list.
template <class Config>
__device__ __forceinline__ void find_large_lse_of_list(const BackwardWorkspace& workspace,
                                                       BackwardWorkTile<Config>& work_tile, int lane) {
  bool found = false;
#pragma unroll 1
  for (int entry = lane; entry < work_tile.tiles.end; entry += 32) {
    const ListedQueries piece = work_tile.steps[entry];
    const int64_t tile =
        work_tile.workspace_tile + piece.head * workspace.tiles_per_head + piece.tile / Config::kPieces;
    found |= finds_large_lse(workspace, tile, 1, 1, 0, 1);
  }
  if (__any_sync(~0u, found)) work_tile.large = true;
  __syncwarp();
}

/// What the table of a call with lists has in addition.
template <bool kListsBlocks>
struct BackwardListedTable {};
template <>
struct BackwardListedTable<true> {
  uint32_t* any_large;  // (1): whether some row of the call has a LargeLse. Few calls have one, so this is read first
};

template <class Config>
struct BackwardTileTable : BackwardListedTable<Config::kListsBlocks> {
  BackwardWorkTile<Config>* tiles;  // (count): key tiles or splits of them; with no heads: nothing to do
  uint32_t* taken;                  // (1): positions that CTAs took; without turns, besides the first of each
  uint32_t count;
  DqShare* shares;  // (count): what is zeroed with each; null where the Config never zeroes
};

/// Places a table of `positions` entries after `bytes` bytes of memory, and adds its size to `bytes`.
template <class Config>
BackwardTileTable<Config> take_table(void* memory, int64_t& bytes, int64_t positions) {
  constexpr int64_t kHeadBytes = 128;
  const int64_t begin = (bytes + kHeadBytes - 1) / kHeadBytes * kHeadBytes;
  char* const g_table = static_cast<char*>(memory) + begin;
  BackwardTileTable<Config> table;
  table.taken = reinterpret_cast<uint32_t*>(g_table);
  table.tiles = reinterpret_cast<BackwardWorkTile<Config>*>(g_table + kHeadBytes);
  table.count = grid_size(positions);
  table.shares = Config::kZeroesDq ? reinterpret_cast<DqShare*>(table.tiles + table.count) : nullptr;
  constexpr size_t kEntryBytes = sizeof(BackwardWorkTile<Config>) + (Config::kZeroesDq ? sizeof(DqShare) : 0);
  bytes = begin + kHeadBytes + table.count * static_cast<int64_t>(kEntryBytes);
  return table;
}

/// Scratch memory of a call: the workspace, the schedule's memory and the table.
template <class Config>
struct BackwardPersistentMemory {
  BackwardWorkspace workspace;
  BackwardSchedule schedule;
  BackwardTileTable<Config> table;
  int64_t bytes;

  BackwardPersistentMemory(const BackwardParams& p, void* memory)
      : workspace(p, Config::kBlockM, Config::kBlockN, Config::kDqHeadDim, memory, false),
        schedule(p, Config::kBlockN, Config::kHeadDim, false, static_cast<char*>(memory) + workspace.bytes),
        bytes(workspace.bytes + schedule.bytes) {
    table = take_table<Config>(memory, bytes, schedule.positions());
    if (Config::kFirstTurnsStore) workspace.let_first_turns_store(p);
    if (!Config::kZeroesDq || schedule.listing.listed) return;
    const int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
    // No warps count themselves: in this kernel that slows down long sequences by 4 to 8 %.
    workspace.leave_dq_to_main_kernel(p, schedule.order, 0, num_sms, num_sms);
  }
};

/// Fills the table. Called by all threads of a grid.
template <class Config>
__device__ __forceinline__ void fill_table(const BackwardParams& p, const BackwardWorkspace& workspace,
                                           const BackwardSchedule& schedule, const BackwardTileTable<Config>& table) {
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  if (first == 0) *table.taken = 0;
#pragma unroll 1
  for (uint32_t position = first; position < table.count; position += gridDim.x * blockDim.x) {
    const BackwardTaskOf<Config> task(p, schedule, schedule.locate(position));
    BackwardWorkTile<Config> tile(p, workspace, schedule, task);
    if (!task.exists()) tile.heads = 0;
    table.tiles[position] = tile;
    if constexpr (Config::kZeroesDq)
      table.shares[position] = BackwardPersistentDqZeroing<Config>::share_of(p, workspace, position);
  }
}

/// Records in the table whether a row of the CTA has a LargeLse. Each thread reads flags that it has written itself.
template <class Config>
__device__ __forceinline__ void record_large_lse(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                 const BackwardTileTable<Config>& table,
                                                 const volatile RowTileOfCta& cta) {
  static_assert(Config::kListsBlocks, "every tile of a dense batch has rows");
  if (threadIdx.x % 32 != 0) return;
  const int64_t tile = workspace.tile_index(p, cta.batch, cta.first_head, 0, cta.tile, Config::kBlockM);
  if (workspace.large[tile * kLargeParts + threadIdx.x / 32]) atomicOr(table.any_large, 1u);
}

/// Computes row terms (row_terms.cuh) and fills the table. `row_ctas`: how many CTAs compute row terms.
template <class Config>
static __global__ void __launch_bounds__(kRowTermThreads, kRowTermCtas)
    backward_persistent_rows_kernel(const __grid_constant__ BackwardParams p, const BackwardWorkspace workspace,
                                    const __grid_constant__ BackwardSchedule schedule,
                                    const BackwardTileTable<Config> table, const uint32_t row_ctas) {
  ptx::launch_dependents();
  fill_table(p, workspace, schedule, table);
  if (blockIdx.x >= row_ctas) return;
  const volatile RowTileOfCta& cta = RowTileOfCta::find(p, workspace.row_tiles);
#pragma unroll 1
  for (int head = cta.first_head; head < cta.end_head; ++head)
    write_row_terms<typename Config::Element, Config::kHeadDim, Config::kBlockM, true, true>(p, workspace, cta, head);
  if constexpr (Config::kListsBlocks) record_large_lse<Config>(p, workspace, table, cta);
}

}  // namespace flash_ext::sm90
