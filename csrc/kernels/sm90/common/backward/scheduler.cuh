// The work tile of a CTA of the backward: a tile of keys, and its steps, the query tiles that it loops over.
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

namespace flash_ext::sm90 {

/// Where few queries of a tile see the keys, a multiple of kTailQueries is computed: dS^T lies in panels of that many
/// queries.
constexpr int kTailQueries = 32;

/// A query tile of a head. `head` is counted from the first of the group.
struct BackwardStep {
  int head, tile;
};

/// The same as the metadata of a step that a mask of pairs leaves (BackwardStepFinder). `head` counts among all.
struct alignas(16) FoundQueries {
  int32_t head, tile;
  int32_t words;           // number of the tile's words; -1: none
  int32_t has_non_finite;  // whether Q or dO may hold Inf or NaN
};

template <class Config>
using BackwardTaskOf = BackwardTask<Config::kBlockM, Config::kBlockN, Config::kAnchored>;

/// Which steps a block mask leaves of a tile of keys (common/backward/query_lists.h).
template <bool kListsBlocks>
struct WorkTileSteps {};
template <>
struct WorkTileSteps<true> {
  const ListedQueries* steps;
  const uint2* visible;  // QueryLists::visible
};

/// Where the steps of a key tile begin and end. Persistent CTAs begin with the first query that sees their keys, and
/// end soon after the last one. These are fewer steps, as tiles of 96 queries seldom begin or end where 128 keys do.
/// CTAs that take turns do not do so: they need query tiles that are the same for all of them.
template <bool kAnchored>
struct WorkTileAnchor {
  static constexpr int skipped = 0, tail_queries = 0;
  __device__ __forceinline__ explicit WorkTileAnchor(int) {}
};
template <>
struct WorkTileAnchor<true> {
  int skipped;           // queries before the first one of `sequence`, which begins later here
  int tail_queries = 0;  // queries of the last tile of each head that are computed; 0: all
  __device__ __forceinline__ explicit WorkTileAnchor(int skipped) : skipped(skipped) {}
};

/// How many groups of kWarpgroupRows keys a key tile has: one for each consumer warpgroup, or each CTA of a cluster.
template <class Config>
constexpr int kKeyGroups = Config::kBlockN / kWarpgroupRows;

/// A key tile of a key head, and the query tiles that see it, of all heads of the group or of those of a split.
template <class Config>
struct BackwardWorkTile : WorkTileSteps<Config::kListsBlocks>, WorkTileAnchor<Config::kAnchored> {
  using Anchor = WorkTileAnchor<Config::kAnchored>;

  Sequence sequence;  // its head is the first of `heads`
  int heads;          // query heads: of the group, or of the split
  int first_key;
  TileSpan tiles;                       // of queries; full: each computed query sees all keys that exist
  QueryTileOrder order;                 // of `tiles`
  TileSpan groups[kKeyGroups<Config>];  // query tiles that see each key group; full: no pair is hidden
  int64_t workspace_tile;               // number of the tile of query 0 of the first head
  float* sums;                          // where a split stores dK, and dV after it; null: no split
  bool large = false;                   // some row has a LargeLse; then no tile of `groups` is full

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
      list_steps(workspace.query_lists);
    } else if constexpr (Config::kHasTails) {
      find_tail();
    }
  }

  __device__ __forceinline__ BackwardStep first_step() const {
    return {tiles.begin < tiles.end ? 0 : heads, Config::kTurns == TurnTaking::kAlways ? order.first : tiles.begin};
  }
  /// Moves to the next step. Past the last one, head is past the group.
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

  /// The CTA's turn at a query tile: how many key tiles before this one the query tile sees.
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
  /// Replaces the range of tiles by the list: `tiles` then counts its entries.
  __device__ __forceinline__ void list_steps(const QueryLists& lists) {
    const int64_t list = lists.index(sequence.batch, sequence.head_kv, first_key / Config::kBlockN);
    tiles.begin = tiles.full_begin = tiles.full_end = 0;
    tiles.end = lists.counts[list];
    this->steps = lists.steps + list * lists.most_steps;
    this->visible = lists.visible;
    if constexpr (Config::kHasTails) this->tail_queries = tiles.end % Config::kPieces * kTailQueries;
  }
};

/// Returns the position of a CTA in the order of tiles. Where additions to dQ take turns, CTAs get positions in the
/// order in which they start.
template <class Config, class Storage>
__device__ __forceinline__ uint32_t position_of_cta(const BackwardWorkspace& workspace, Storage& storage) {
  if (Config::kTurns == TurnTaking::kNever || !workspace.turns) return blockIdx.x;
  auto& number = reinterpret_cast<uint32_t&>(storage.work_tile);
  if (threadIdx.x == 0) number = take_number(workspace);
  __syncthreads();
  const uint32_t taken = number;
  __syncthreads();  // thread 0 writes the work tile to this memory next
  return taken;
}

/// Looks for a LargeLse in the rows of all tiles, and records it in the work tile. Each consumer warp calls it, `group`
/// being its warpgroup, before its first step. The warps of a warpgroup find and write the same.
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
