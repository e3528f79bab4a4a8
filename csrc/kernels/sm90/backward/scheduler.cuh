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

/// A tile of queries of a head, counted from the first of the group.
struct BackwardStep {
  int head, tile;
};

template <class Config>
using BackwardTaskOf = BackwardTask<Config::kBlockM, Config::kBlockN, Config::kPersistent>;

/// Which steps a block mask leaves of a tile of keys (common/backward/query_lists.h).
template <bool kListsBlocks>
struct WorkTileSteps {};
template <>
struct WorkTileSteps<true> {
  const ListedQueries* steps;
  const uint2* visible;  // by bitmaps: that of the first lane, for the first step that bitmaps have
  int visible_stride;    // between steps of bitmaps
};

/// Persistent CTAs begin with the first query that sees their keys: fewer steps, as 96 queries seldom begin where 128
/// keys do.
template <bool kAnchored>
struct WorkTileAnchor {
  static constexpr int skipped = 0;
  __device__ __forceinline__ explicit WorkTileAnchor(int) {}
};
template <>
struct WorkTileAnchor<true> {
  int skipped;  // queries before the first of the tile's sequence
  __device__ __forceinline__ explicit WorkTileAnchor(int skipped) : skipped(skipped) {}
};

/// A key tile of a key head, and the query tiles that see it, of all heads of the group or of those of a split.
template <class Config>
struct BackwardWorkTile : WorkTileSteps<Config::kListsBlocks>, WorkTileAnchor<Config::kPersistent> {
  using Anchor = WorkTileAnchor<Config::kPersistent>;

  Sequence sequence;  // its head is the first of those below
  int heads;          // of the group
  int first_key;
  TileSpan tiles;                    // of queries; full: every one sees all of the keys that are there
  QueryTileOrder order;              // of these
  TileSpan groups[Config::kGroups];  // that see the keys of a warpgroup; full: nothing is hidden from them
  int64_t workspace_tile;            // of query 0 of the first head
  float* sums;                       // where a split leaves dK, and dV behind it; null: they are complete
  bool large = false;                // some row has a LargeLse; then nothing of `groups` is full

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
    for (int g = 0; g < Config::kGroups; ++g) {
      const int first = first_key + g * kWarpgroupRows, end = first + kWarpgroupRows;
      groups[g] = sequence.query_tiles<Config::kBlockM>(first, min(end, sequence.seqlen_k));
      if (end > sequence.seqlen_k) groups[g].full_begin = groups[g].full_end = groups[g].end;
      groups[g].begin = max(groups[g].begin, tiles.begin), groups[g].end = min(groups[g].end, tiles.end);
    }
    if constexpr (Config::kListsBlocks) list_steps(p, workspace.query_lists);
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
  /// Replaces the range of tiles by the list: tiles then count along it.
  __device__ __forceinline__ void list_steps(const AttentionParams& p, const QueryLists& lists) {
    const int64_t list = lists.index(sequence.batch, sequence.head_kv, first_key / Config::kBlockN);
    tiles.begin = tiles.full_begin = tiles.full_end = 0;
    tiles.end = lists.counts[list];
    this->steps = lists.steps + list * lists.most_steps;
    this->visible = lists.visible + first_key % static_cast<int>(p.blocks.block_n) / 16 * 32;
    this->visible_stride = static_cast<int>(p.blocks.block_n) / 16 * 32;
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
  const uint32_t drawn = number;
  __syncthreads();
  return drawn;
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

/// The same for all warpgroups, by one warp, after the wait for row terms.
template <class Config>
__device__ __forceinline__ void find_large_lse_of_all(const BackwardWorkspace& workspace,
                                                      BackwardWorkTile<Config>& work_tile, int lane) {
  constexpr int kBlockM = Config::kBlockM;
  const int begin = work_tile.tiles.begin * kBlockM,
            end = min(work_tile.tiles.end * kBlockM, work_tile.sequence.seqlen_q);
  const int first = (work_tile.skipped + begin) / kBlockM;
  const int tiles = begin < end ? (work_tile.skipped + end + kBlockM - 1) / kBlockM - first : 0;
  if (!__any_sync(~0u, finds_large_lse(workspace, work_tile.workspace_tile + first, tiles, work_tile.heads, lane, 32)))
    return;
  work_tile.large = true;
#pragma unroll
  for (TileSpan& seen : work_tile.groups) seen.full_begin = seen.full_end = seen.end;
  __syncwarp();
}

/// Slots for the metadata of found steps: one more than stages of Q. That of step m + 2 is written when dS of step m is
/// complete. By then dQ's warps have released dS of m - 2, and so have read its metadata, but they may not have begun m
/// - 1.
constexpr int kMetadataSlots = 4;

/// The query tiles that a CTA loops over, with the stage of their Q and dO. They are kept in uniform registers, from
/// which TMA takes its operands.
template <class Config>
struct BackwardPipelinedSteps {
  const int first, past, stride, first_head, end_head;
  int head, tile, left;
  uint32_t stage = 0, parity = 0;
  uint32_t count = 0;  // of steps before

  template <class Storage>
  __device__ __forceinline__ explicit BackwardPipelinedSteps(const Storage& storage)
      : BackwardPipelinedSteps(storage.work_tile) {}
  __device__ __forceinline__ explicit BackwardPipelinedSteps(const BackwardWorkTile<Config>& work_tile)
      : first(ptx::uniform(work_tile.order.first)),
        past(ptx::uniform(work_tile.order.past)),
        stride(Config::kTurns != TurnTaking::kNever ? ptx::uniform(work_tile.order.stride) : 1),
        first_head(ptx::uniform(work_tile.sequence.head)),
        end_head(ptx::uniform(work_tile.sequence.head + work_tile.heads)),
        head(first_head),
        tile(first),
        left(ptx::uniform(work_tile.heads * (work_tile.tiles.end - work_tile.tiles.begin))) {}

  /// The stage of dO and D.
  __device__ __forceinline__ uint32_t grad_stage() const { return Config::kBiased ? count % 2 : stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return Config::kBiased ? count / 2 % 2 : parity; }
  __device__ __forceinline__ bool takes_turns() const { return Config::kTurns != TurnTaking::kNever && stride < 0; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (takes_turns()) {
      if (++head == end_head) head = first_head, tile += stride;
    } else {
      tile += stride;
      if (tile == past) tile = first, ++head;
    }
    ++count;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
  }
};

/// The same where a list names the tiles. The metadata of a step comes with its Q.
template <class Config>
struct BackwardListedSteps {
  int left;
  uint32_t stage = 0, parity = 0;

  template <class Storage>
  __device__ __forceinline__ explicit BackwardListedSteps(const Storage& storage)
      : left(ptx::uniform(storage.work_tile.tiles.end)) {}

  __device__ __forceinline__ uint32_t grad_stage() const { return stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return parity; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
  }
};

/// The same where a warp finds the steps as it goes. Their number is known before.
template <class Config>
struct BackwardFoundSteps {
  int left;
  uint32_t stage = 0, parity = 0, slot = 0;  // slot: of its metadata

  template <class Storage>
  __device__ __forceinline__ explicit BackwardFoundSteps(const Storage& storage) : left(ptx::uniform(storage.steps)) {}

  __device__ __forceinline__ uint32_t grad_stage() const { return stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return parity; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
    slot = (slot + 1) % kMetadataSlots;
  }
};

template <class Config>
using BackwardStepsOf = std::conditional_t<
    Config::kListsBlocks, BackwardListedSteps<Config>,
    std::conditional_t<Config::kFindsSteps, BackwardFoundSteps<Config>, BackwardPipelinedSteps<Config>>>;

}  // namespace flash_ext::sm90
