// The work of a CTA of the backward: a tile of keys, and its steps, the query tiles that it loops over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "config.cuh"
#include "kernels/common/backward/large_lse.cuh"
#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/turns.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/uniform.h"

namespace flash_ext::sm90 {

/// The queries that are computed of a tile of which few see the keys are a multiple of so many: dS^T lies in panels of
/// so many.
constexpr int kTailQueries = 32;

/// A tile of queries of a head, counted from the first of the group.
struct BackwardStep {
  int head, tile;
};

template <class Config>
using BackwardTaskOf = BackwardTask<Config::kBlockM, Config::kBlockN, Config::kAnchored>;

/// Which steps a block mask leaves of a tile of keys (common/backward/query_lists.h).
template <bool kListsBlocks>
struct WorkTileSteps {};
template <>
struct WorkTileSteps<true> {
  const ListedQueries* steps;
  const uint2* visible;  // by bitmaps: that of the first lane, for the first step that bitmaps have
  int visible_stride;    // between steps of bitmaps
};

/// Persistent CTAs begin with the first query that sees their keys, and end soon behind the last one: fewer steps, as
/// 96 queries seldom begin or end where 128 keys do. Not where they take turns, each at a tile of queries that is the
/// same for all of them.
template <bool kAnchored>
struct WorkTileAnchor {
  static constexpr int skipped = 0, tail_queries = 0;
  __device__ __forceinline__ explicit WorkTileAnchor(int) {}
};
template <>
struct WorkTileAnchor<true> {
  int skipped;           // queries before the first of the tile's sequence
  int tail_queries = 0;  // that are computed of the last tile of each head; 0: all
  __device__ __forceinline__ explicit WorkTileAnchor(int skipped) : skipped(skipped) {}
};

/// Groups of kWarpgroupRows keys of a key tile: of a consumer warpgroup each, or of a CTA of a cluster.
template <class Config>
constexpr int kKeyGroups = Config::kBlockN / kWarpgroupRows;

/// A key tile of a key head, and the query tiles that see it, of all heads of the group or of those of a split.
template <class Config>
struct BackwardWorkTile : WorkTileSteps<Config::kListsBlocks>, WorkTileAnchor<Config::kAnchored> {
  using Anchor = WorkTileAnchor<Config::kAnchored>;

  Sequence sequence;  // its head is the first of those below
  int heads;          // of the group
  int first_key;
  TileSpan tiles;                       // of queries; full: every one that is computed sees all keys that are there
  QueryTileOrder order;                 // of these
  TileSpan groups[kKeyGroups<Config>];  // that see each key group; full: nothing is hidden from them
  int64_t workspace_tile;               // of query 0 of the first head
  float* sums;                          // where a split leaves dK, and dV behind it; null: they are complete
  bool large = false;                   // some row has a LargeLse; then nothing of `groups` is full

  __device__ __forceinline__ BackwardWorkTile(const BackwardParams& p, const BackwardWorkspace& workspace,
                                              const BackwardSchedule& schedule, const BackwardTaskOf<Config>& task)
      : Anchor(task.skipped),
        sequence(task.sequence),
        heads(task.heads),
        first_key(task.first_key),
        tiles(task.tiles),
        order(tiles.begin, tiles.end, Config::kTurns != TurnTaking::kNever && workspace.turns),
        workspace_tile(workspace.tile_index(p, sequence.batch, sequence.head, sequence.q_begin - task.skipped, 0,
                                            Config::kBlockM)),
        sums(task.sums(schedule)) {
    for (int g = 0; g < kKeyGroups<Config>; ++g) {
      const int first = first_key + g * kWarpgroupRows, end = first + kWarpgroupRows;
      groups[g] = sequence.query_tiles<Config::kBlockM>(first, min(end, sequence.seqlen_k));
      if (end > sequence.seqlen_k) groups[g].full_begin = groups[g].full_end = groups[g].end;
      groups[g].begin = max(groups[g].begin, tiles.begin), groups[g].end = min(groups[g].end, tiles.end);
    }
    if constexpr (Config::kListsBlocks) {
      list_steps(p, workspace.query_lists);
    } else if constexpr (Config::kHasTails) {
      find_tail();
    }
  }

  __device__ __forceinline__ BackwardStep first_step() const {
    return {tiles.begin < tiles.end ? 0 : heads, Config::kTurns == TurnTaking::kAlways ? order.first : tiles.begin};
  }
  /// Past the last one, head is past the group.
  __device__ __forceinline__ void advance(BackwardStep& step) const {
    if constexpr (Config::kTurns != TurnTaking::kAlways) {
      if (++step.tile < tiles.end) return;
      step.tile = tiles.begin;
      ++step.head;
      return;
    }
    if (step.head >= heads || ++step.head < heads) return;
    step.tile += order.stride;
    if (step.tile != order.past) step.head = 0;
  }

  /// How many key tiles before this one the query tile sees.
  __device__ __forceinline__ int turn(int tile) const {
    return first_key / Config::kBlockN - sequence.keys_begin(tile * Config::kBlockM) / Config::kBlockN;
  }

  /// Whether some pair of the tile may be hidden, so that Inf and NaN must not reach its products.
  __device__ __forceinline__ bool is_sanitised(int tile) const {
    return tile < tiles.full_begin || tile >= tiles.full_end;
  }

 private:
  /// Where few queries of the last tile see the keys, only these are computed. It then counts as full if each of them
  /// sees all keys. A warpgroup whose keys nobody sees has no tiles, full or not.
  __device__ __forceinline__ void find_tail() {
    const int first_query = (tiles.end - 1) * Config::kBlockM;
    const int end_of_keys = min(first_key + Config::kBlockN, sequence.seqlen_k);
    const int queries = sequence.queries_end(end_of_keys - 1) - first_query;
    const int computed = (queries + kTailQueries - 1) / kTailQueries * kTailQueries;
    if (tiles.begin >= tiles.end || computed >= Config::kBlockM) return;
    this->tail_queries = computed;
    const int end = first_query + computed;
    if (sequence.queries_end(first_key) >= end) tiles.full_end = tiles.end;
    for (int g = 0; g < kKeyGroups<Config>; ++g) {
      const int first = first_key + g * kWarpgroupRows;
      const bool sees = groups[g].begin < groups[g].end, exists = first + kWarpgroupRows <= sequence.seqlen_k;
      if (sees && exists && sequence.queries_end(first) >= end) groups[g].full_end = tiles.end;
    }
  }
  /// Replaces the range of tiles by the list: tiles then count along it.
  __device__ __forceinline__ void list_steps(const AttentionParams& p, const QueryLists& lists) {
    const int64_t list = lists.index(sequence.batch, sequence.head_kv, first_key / Config::kBlockN);
    tiles.begin = tiles.full_begin = tiles.full_end = 0;
    tiles.end = lists.counts[list];
    this->steps = lists.steps + list * lists.most_steps;
    this->visible = lists.visible + first_key % static_cast<int>(p.blocks.block_n) / 16 * 32;
    this->visible_stride = static_cast<int>(p.blocks.block_n) / 16 * 32;
    if constexpr (Config::kHasTails) this->tail_queries = tiles.end % Config::kPieces * kTailQueries;
  }
};

/// The position of a CTA in the order of tiles. Where additions to dQ take turns, CTAs get positions in the order in
/// which they start.
template <class Config, class Storage>
__device__ __forceinline__ uint32_t position_of_cta(const BackwardWorkspace& workspace, Storage& storage) {
  if (Config::kTurns == TurnTaking::kNever || !workspace.turns) return blockIdx.x;
  auto& number = reinterpret_cast<uint32_t&>(storage.work_tile);
  if (threadIdx.x == 0) number = take_number(workspace);
  __syncthreads();
  const uint32_t taken = number;
  __syncthreads();
  return taken;
}

/// Called by each consumer warp, of warpgroup `group`, before its first look at a tile. All of them find and write the
/// same.
template <class Config>
__device__ __forceinline__ void find_large_lse(const BackwardWorkspace& workspace, BackwardWorkTile<Config>& work_tile,
                                               int group, int lane) {
  ptx::wait_for_previous_grid();  // for row terms
  bool found = false;
  if constexpr (Config::kListsBlocks) {
    for (int step = lane; step < work_tile.tiles.end; step += 32) {
      const ListedQueries queries = work_tile.steps[step];
      const int64_t tile = work_tile.workspace_tile + queries.head * workspace.tiles_per_head + queries.tile;
      found |= finds_large_lse(workspace, tile, 1, 1, 0, 1);
    }
  } else {
    const int tiles = work_tile.tiles.end - work_tile.tiles.begin;
    const int64_t first_tile = work_tile.workspace_tile + work_tile.tiles.begin;
    found = finds_large_lse(workspace, first_tile, tiles, work_tile.heads, lane, 32);
  }
  if (!__any_sync(~0u, found)) return;
  TileSpan& seen = work_tile.groups[group];
  if (lane == 0) work_tile.large = true, seen.full_begin = seen.full_end = seen.end;
  __syncwarp();
}

}  // namespace flash_ext::sm90
