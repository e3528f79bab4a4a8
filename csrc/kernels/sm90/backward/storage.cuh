// What the warps of a CTA of the backward share: the shapes of its tiles, what it works on, and the barriers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/backward/large_lse.cuh"
#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/turns.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/ring.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/sm90/common/barriers.h"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// kInTurns: additions to dQ take turns. A kernel of its own, as a loop that can go either way costs the others a
/// tenth.
template <class Element_, int kHeadDim_, bool kInTurns_ = false>
struct BackwardConfig {
  using Element = Element_;
  static constexpr bool kListsBlocks = false;
  static constexpr bool kInTurns = kInTurns_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kBackwardBlockM;
  static constexpr int kBlockN = kGroups * kWarpgroupRows;
  static constexpr int kStages = 2;  // of Q, dO and dS
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kCluster = 1;  // CTAs that share kBlockN keys
  static constexpr int kLoadedKeys = kBlockN;
  static constexpr int kDqHeadDim = kHeadDim;  // of the workspace

  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);    // K, V
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);  // a stage of Q or dO
  static constexpr int kDsPanelBytes = panel_bytes(kBlockM);         // dS of a warpgroup's keys
  static constexpr int kDsBytes = kGroups * kDsPanelBytes;
  static constexpr int kDqPieceBytes = 16 * kPanelColumns * 4;  // dQ of a warp, a panel of columns
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + kStages * kDsBytes;
  static constexpr int kTilesBytes = kDqOffset + kWarpgroupWarps * panels(kHeadDim) * kDqPieceBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kWarpgroupRows == kPanelColumns, "dS of a warpgroup's keys is a panel");
  static_assert(kGroups * kShape.registers + kShape.dq_registers <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// The address as descriptors take it. In a cluster its upper bits are the CTA's rank, which would change what they
/// say of panels.
template <class Config>
__device__ __forceinline__ uint32_t without_rank(uint32_t s_tile) {
  constexpr uint32_t kOwnMemory = (1u << 18) - 1;
  return Config::kCluster > 1 ? s_tile & kOwnMemory : s_tile;
}

/// dQ of a tile while it is summed up in memory: in the order of the accumulators of the warps that compute it.
template <int kHeadDim>
struct BackwardDqLayout {
  static constexpr int kM = 1, kN = kHeadDim / 8;
  __device__ __forceinline__ static int first_row(int warp) { return warp * 16; }
  __device__ __forceinline__ static int first_column(int) { return 0; }
  __device__ __forceinline__ static int fragment(int warp, int, int n) { return (warp * kN + n) * 128; }
  /// Element e of the lanes 4 g + t, for t = 0..3: rows g (e < 2) and g + 8, columns 2 t + e % 2.
  __device__ __forceinline__ static void load_quad(const float* g_fragment, int g, float (&x)[4][4]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 lane = reinterpret_cast<const float4*>(g_fragment)[4 * g + t];
      x[t][0] = lane.x, x[t][1] = lane.y, x[t][2] = lane.z, x[t][3] = lane.w;
    }
  }
};

/// A tile of queries of a head, counted from the first of the group.
struct BackwardStep {
  int head, tile;
};

template <class Config>
using BackwardTaskOf = BackwardTask<Config::kBlockM, Config::kBlockN>;

/// Which steps a block mask leaves of a tile of keys (common/backward/query_lists.h).
template <bool kListsBlocks>
struct WorkTileSteps {};
template <>
struct WorkTileSteps<true> {
  const ListedQueries* steps;
  const uint2* visible;  // by bitmaps: that of the first lane, for the first step that bitmaps have
  int visible_stride;    // between steps of bitmaps
};

/// A tile of keys of a key head, and the tiles of queries that see it, of heads of the group: of all, or a split's.
template <class Config>
struct BackwardWorkTile : WorkTileSteps<Config::kListsBlocks> {
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
      : sequence(task.sequence),
        heads(task.heads),
        first_key(task.first_key),
        tiles(task.tiles),
        order(tiles.begin, tiles.end, Config::kInTurns && workspace.turns),
        workspace_tile(workspace.tile_index(p, sequence.batch, sequence.head, sequence.q_begin, 0, Config::kBlockM)),
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
    return {tiles.begin < tiles.end ? 0 : heads, Config::kInTurns ? order.first : tiles.begin};
  }
  /// Past the last one, head is past the group.
  __device__ __forceinline__ void advance(BackwardStep& step) const {
    if constexpr (!Config::kInTurns) {
      if (++step.tile < tiles.end) return;
      step.tile = tiles.begin;
      ++step.head;
      return;
    }
    if (step.head >= heads || ++step.head < heads) return;
    step.tile += order.stride;
    if (step.tile != order.past) step.head = 0;
  }

  /// How many tiles of keys a tile of queries sees before these.
  __device__ __forceinline__ int turn(int tile) const {
    return first_key / Config::kBlockN - sequence.keys_begin(tile * Config::kBlockM) / Config::kBlockN;
  }

  /// Whether some query of the tile does not see some key, and so must not meet what is not finite in it.
  __device__ __forceinline__ bool is_sanitised(int tile) const {
    return tile < tiles.full_begin || tile >= tiles.full_end;
  }

 private:
  /// Tiles are then counted along the list.
  __device__ __forceinline__ void list_steps(const AttentionParams& p, const QueryLists& lists) {
    const int64_t list = lists.index(sequence.batch, sequence.head_kv, first_key / Config::kBlockN);
    tiles.begin = tiles.full_begin = tiles.full_end = 0;
    tiles.end = lists.counts[list];
    this->steps = lists.steps + list * lists.most_steps;
    this->visible = lists.visible + first_key % static_cast<int>(p.blocks.block_n) / 16 * 32;
    this->visible_stride = static_cast<int>(p.blocks.block_n) / 16 * 32;
  }
};

/// The place of a CTA in the order of tiles. Where additions to dQ take turns, that in which CTAs start.
template <class Config, class Storage>
__device__ __forceinline__ uint32_t position_of_cta(const BackwardWorkspace& workspace, Storage& storage) {
  if (!Config::kInTurns || !workspace.turns) return blockIdx.x;
  auto& number = *reinterpret_cast<uint32_t*>(storage.work_tile_bytes);
  if (threadIdx.x == 0) number = draw_number(workspace);
  __syncthreads();
  const uint32_t drawn = number;
  __syncthreads();
  return drawn;
}

/// By each warp that computes, of warpgroup `group`, before its first look at a tile. All of them find and write the
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

/// Behind the tiles in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct BackwardStorage {
  static constexpr int kStages = Config::kStages;

  float lse[kStages][Config::kBlockM];  // base 2
  float minus_delta[kStages][Config::kBlockM];
  uint64_t k_full, v_full;
  uint64_t q_full[kStages], q_empty[kStages];    // with lse
  uint64_t do_full[kStages], do_empty[kStages];  // with minus_delta
  uint64_t ds_full[kStages], ds_empty[kStages];
  __align__(8) unsigned char work_tile_bytes[sizeof(BackwardWorkTile<Config>)];

  __device__ __forceinline__ BackwardWorkTile<Config>& work_tile() {
    return *reinterpret_cast<BackwardWorkTile<Config>*>(work_tile_bytes);
  }
  __device__ __forceinline__ const BackwardWorkTile<Config>& work_tile() const {
    return *reinterpret_cast<const BackwardWorkTile<Config>*>(work_tile_bytes);
  }

  /// What options of the pipelined loop need beside the work tile.
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
  __device__ __forceinline__ void look_at_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kGroups * kWarpgroupWarps;
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(q_empty, kConsumers);
    init_barriers(do_full, 1);
    init_barriers(do_empty, kConsumers);
    init_barriers(ds_full, kConsumers);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
