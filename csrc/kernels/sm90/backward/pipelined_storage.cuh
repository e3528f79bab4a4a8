// What the warps of a CTA share where the products of a step overlap those of the next: three stages of Q and dO.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/ptx/uniform.h"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// kListsBlocks: a block mask's lists say which steps there are. kBiased: a bias of query-key pairs has the room of a
/// stage of dO.
template <class Element_, int kHeadDim_, bool kListsBlocks_ = false, bool kBiased_ = false>
struct BackwardPipelinedConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kListsBlocks = kListsBlocks_;
  static constexpr bool kInTurns = !kListsBlocks;  // if a call asks for it
  static constexpr bool kTellsSteps = false;       // those that a mask of pairs leaves, as they are found
  static constexpr BackwardShape kShape = kListsBlocks ? backward_blocks_shape() : backward_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kBackwardBlockM;
  static constexpr int kBlockN = kGroups * kWarpgroupRows;
  static constexpr bool kBiased = kBiased_;
  static constexpr int kStages = 3;                    // of Q and dO
  static constexpr int kGradStages = kBiased ? 2 : 3;  // of dO
  static constexpr int kDsStages = 2;                  // of dS, whose rows are keys
  static constexpr int kDsSteps = 2;  // of dK's product, that take dS from registers: there are not enough for all
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kLoadedKeys = kBlockN;

  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);    // K, V
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);  // a stage of Q or dO
  static constexpr int kDsBytes = tile_bytes(kBlockN, kBlockM);
  static constexpr int kDqPieceBytes = 16 * kPanelColumns * 4;  // dQ of a warp, a panel of columns
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kValuesOffset + kKeyBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kGradStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + kDsStages * kDsBytes;
  static constexpr int kBiasOffset = kDqOffset + kWarpgroupWarps * panels(kHeadDim) * kDqPieceBytes;
  static constexpr int kBiasPanelBytes = kBiased ? panel_bytes(kBlockM) : 0;  // of a warpgroup's keys, in 16 bits
  static constexpr int kTilesBytes = kBiasOffset + kGroups * kBiasPanelBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kBlockM == kPanelColumns, "dS is one panel");
  static_assert(kGroups * kShape.registers + kShape.dq_registers <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// Places where found steps are told: one more than stages of Q. Step m + 2 is told when dS of step m is complete. That
/// says that dQ's warps have released dS of m - 2, and so read what was told of it, but not that they have begun m - 1.
constexpr int kToldSteps = 4;

/// The tiles of queries that a CTA goes over, and the stage of their Q and dO. In registers that the lanes of a warp
/// share, from which TMA takes its operands without a detour.
template <class Config>
struct BackwardPipelinedSteps {
  const int first, past, stride, first_head, end_head;
  int head, tile, left;
  uint32_t stage = 0, parity = 0;
  uint32_t count = 0;  // of steps before

  template <class Storage>
  __device__ __forceinline__ explicit BackwardPipelinedSteps(const Storage& storage)
      : BackwardPipelinedSteps(storage.work_tile(), 0) {}
  __device__ __forceinline__ BackwardPipelinedSteps(const BackwardWorkTile<Config>& work_tile, int)
      : first(ptx::uniform(work_tile.order.first)),
        past(ptx::uniform(work_tile.order.past)),
        stride(Config::kInTurns ? ptx::uniform(work_tile.order.stride) : 1),
        first_head(ptx::uniform(work_tile.sequence.head)),
        end_head(ptx::uniform(work_tile.sequence.head + work_tile.heads)),
        head(first_head),
        tile(first),
        left(ptx::uniform(work_tile.heads * (work_tile.tiles.end - work_tile.tiles.begin))) {}

  /// The same of dO and D.
  __device__ __forceinline__ uint32_t grad_stage() const { return Config::kBiased ? count % 2 : stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return Config::kBiased ? count / 2 % 2 : parity; }
  __device__ __forceinline__ bool takes_turns() const { return Config::kInTurns && stride < 0; }
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

/// The same where a list says which tiles those are: a step is told beside Q.
template <class Config>
struct BackwardListedSteps {
  int left;
  uint32_t stage = 0, parity = 0;

  template <class Storage>
  __device__ __forceinline__ explicit BackwardListedSteps(const Storage& storage)
      : left(ptx::uniform(storage.work_tile().tiles.end)) {}

  __device__ __forceinline__ uint32_t grad_stage() const { return stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return parity; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
  }
};

/// The same where steps are told as they are found; how many there are is known before.
template <class Config>
struct BackwardFoundSteps {
  int left;
  uint32_t stage = 0, parity = 0, slot = 0;  // slot: where it is told

  template <class Storage>
  __device__ __forceinline__ explicit BackwardFoundSteps(const Storage& storage) : left(ptx::uniform(storage.steps)) {}

  __device__ __forceinline__ uint32_t grad_stage() const { return stage; }
  __device__ __forceinline__ uint32_t grad_parity() const { return parity; }
  __device__ __forceinline__ bool is_past_end() const { return left <= 0; }
  __device__ __forceinline__ void advance() {
    --left;
    if (++stage == Config::kStages) stage = 0, parity ^= 1;
    slot = (slot + 1) % kToldSteps;
  }
};

template <class Config>
using BackwardStepsOf = std::conditional_t<
    Config::kListsBlocks, BackwardListedSteps<Config>,
    std::conditional_t<Config::kTellsSteps, BackwardFoundSteps<Config>, BackwardPipelinedSteps<Config>>>;

/// What is told of steps, by stages.
template <class Config, bool kListsBlocks = Config::kListsBlocks>
struct BackwardToldSteps {};
template <class Config>
struct BackwardToldSteps<Config, true> {
  ListedQueries told[Config::kStages];
};

/// Behind the tiles in shared memory. A barrier's name says what the end of its phase means. Q and dO have no barriers
/// that say that a stage is free: that dS of a step is complete says so of the step before.
template <class Config>
struct BackwardPipelinedStorage : BackwardToldSteps<Config> {
  __align__(16) float lse[Config::kStages][Config::kBlockM];  // base 2; permuted, as minus_delta: row_terms.cuh
  __align__(16) float minus_delta[Config::kStages][Config::kBlockM];
  uint64_t k_full, v_full;
  uint64_t q_full[Config::kStages];   // with lse
  uint64_t do_full[Config::kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  __align__(8) unsigned char work_tile_bytes[sizeof(BackwardWorkTile<Config>)];

  __device__ __forceinline__ BackwardWorkTile<Config>& work_tile() {
    return *reinterpret_cast<BackwardWorkTile<Config>*>(work_tile_bytes);
  }
  __device__ __forceinline__ const BackwardWorkTile<Config>& work_tile() const {
    return *reinterpret_cast<const BackwardWorkTile<Config>*>(work_tile_bytes);
  }

  /// What options need beside the work tile: by the thread that has set it, and then by all.
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
  __device__ __forceinline__ void look_at_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// By one thread.
  __device__ __forceinline__ void init() {
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(do_full, 1);
    init_barriers(ds_full, Config::kGroups * kWarpgroupWarps);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
