// What the tiles, registers and shared memory of several kernels of the backward have in common.
#pragma once

#include <cstdint>

#include "kernels/sm90/common/matrix_descriptor.h"
#include "shape.h"
#include "variant.h"

namespace flash_ext::sm90 {

/// The address as matrix descriptors take it. In a cluster its upper bits hold the CTA's rank, which would change other
/// fields of a descriptor.
template <class Config>
__device__ __forceinline__ uint32_t without_rank(uint32_t s_tile) {
  constexpr uint32_t kOwnMemory = (1u << 18) - 1;
  return Config::kCluster > 1 ? s_tile & kOwnMemory : s_tile;
}

/// Selects the BackwardShape of a kernel for head dims up to kMaxNarrowHeadDim. kOfHeadDim: by its head_dim; kBlocks:
/// the variant of block masks, whose steps come from lists; kPersistent: the persistent kernel, which has K and V of
/// two key tiles.
enum class BackwardShapeKind { kOfHeadDim, kBlocks, kPersistent };

constexpr BackwardShape backward_shape(int head_dim, BackwardShapeKind kind) {
  return kind == BackwardShapeKind::kBlocks       ? backward_blocks_shape()
         : kind == BackwardShapeKind::kPersistent ? backward_persistent_shape()
                                                  : backward_shape(head_dim);
}

/// The constants of these kernels. Warpgroup 0 loads tiles and computes dQ; each of the others computes S, dP, dK and
/// dV of 64 keys.
template <class Element_, int kHeadDim_, int kStages_, BackwardShapeKind kShapeKind = BackwardShapeKind::kOfHeadDim,
          int kGradStages_ = kStages_>
struct BackwardNarrowConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kListsBlocks = kShapeKind == BackwardShapeKind::kBlocks;
  static constexpr bool kPersistent = kShapeKind == BackwardShapeKind::kPersistent;
  static constexpr bool kAnchored = kPersistent;  // whether steps begin with the first query that sees the key tile
  static constexpr bool kHasTails = false;        // whether only some queries of the last tile may be computed
  static constexpr BackwardShape kShape = backward_shape(kHeadDim, kShapeKind);
  static constexpr int kWarpgroups = kShape.key_groups;  // of consumers
  static constexpr int kBlockM = kShape.block_m;
  static constexpr int kBlockN = kWarpgroups * kWarpgroupRows;
  static constexpr int kStages = kStages_;          // of Q
  static constexpr int kGradStages = kGradStages_;  // of dO
  static constexpr int kDsStages = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kCluster = 1;  // CTAs that share kBlockN keys
  static constexpr int kLoadedKeys = kBlockN;
  static constexpr int kDqHeadDim = kHeadDim;     // of dQ in the workspace
  static constexpr bool kFirstTurnsStore = true;  // whether the first addition to a tile of dQ may overwrite it
  static constexpr bool kZeroesDq = false;        // whether the main kernel zeroes sums of dQ (dq_zeroing.cuh)

  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);                  // K, V
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);                // a stage of Q or dO
  static constexpr int kDsPanelBytes = panel_bytes(kBlockM);                       // dS of a warpgroup's keys
  static constexpr int kDsQueries = kBlockM % kPanelColumns ? 32 : kPanelColumns;  // queries of a panel, keys as rows
  static constexpr int kDsBytes = kWarpgroups * kDsPanelBytes;
  static constexpr int kDqSliceBytes = kBlockM / 4 * kPanelColumns * 4;  // a warp's dQ, one panel of columns
  static constexpr int kKeySlots = kPersistent ? 2 : 1;                  // each for K and V of a key tile
  static constexpr int kKeySlotBytes = 2 * kKeyBytes;
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kKeySlots * kKeySlotBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kGradStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + kDsStages * kDsBytes;
  static constexpr int kTilesBytes = kDqOffset + kWarpgroupWarps * panels(kHeadDim) * kDqSliceBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kWarpgroupRows == kPanelColumns && (kPersistent || kBlockM == kPanelColumns),
                "dS of a warpgroup's keys is a panel");
  static_assert(kWarpgroups * kShape.registers + kShape.dq_registers <= 65536 / kThreads / 8 * 8 * (kWarpgroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// Adds the options that a variant serves, as StepFlags: these and no others, or with kAnyOptions any.
template <class Base, int kOptions_>
struct BackwardOptionsConfig : Base {
  static constexpr int kOptions = kOptions_;
  static constexpr bool kAny = kOptions == kAnyOptions;

  static constexpr bool may_have(int option) { return kAny || (kOptions & option) != 0; }
  /// Whether a step has the option. Where a variant serves certain options, all its steps have them, but for
  /// kStepMasked: under a mask of pairs some tiles are full.
  template <int kOption>
  __device__ __forceinline__ static bool has(int flags) {
    return may_have(kOption) && ((!kAny && kOption != kStepMasked) || (flags & kOption) != 0);
  }
};

}  // namespace flash_ext::sm90
