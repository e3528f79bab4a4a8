// Tiles, registers and shared memory of the backward's kernels.
#pragma once

#include <cstdint>

#include "kernels/common/backward/turns.cuh"
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

/// Tiles and registers of a kernel up to kMaxNarrowHeadDim: those of its head_dim, those of block masks, whose lists
/// say which steps there are, or those of the persistent kernel, which has K and V of two key tiles.
enum class BackwardTiling { kOfHeadDim, kBlocks, kPersistent };

constexpr BackwardShape backward_shape(int head_dim, BackwardTiling tiling) {
  return tiling == BackwardTiling::kBlocks       ? backward_blocks_shape()
         : tiling == BackwardTiling::kPersistent ? backward_persistent_shape()
                                                 : backward_shape(head_dim);
}

/// What these kernels have in common: warpgroup 0 loads and computes dQ, the others compute the rest, 64 keys each.
template <class Element_, int kHeadDim_, int kStages_, BackwardTiling kTiling = BackwardTiling::kOfHeadDim,
          int kGradStages_ = kStages_>
struct BackwardNarrowConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kListsBlocks = kTiling == BackwardTiling::kBlocks;
  static constexpr bool kPersistent = kTiling == BackwardTiling::kPersistent;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim, kTiling);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kShape.block_m;
  static constexpr int kBlockN = kGroups * kWarpgroupRows;
  static constexpr int kStages = kStages_;          // of Q
  static constexpr int kGradStages = kGradStages_;  // of dO
  static constexpr int kDsStages = 2;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kCluster = 1;  // CTAs that share kBlockN keys
  static constexpr int kLoadedKeys = kBlockN;
  static constexpr int kDqHeadDim = kHeadDim;  // of the workspace

  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);                  // K, V
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);                // a stage of Q or dO
  static constexpr int kDsPanelBytes = panel_bytes(kBlockM);                       // dS of a warpgroup's keys
  static constexpr int kDsQueries = kBlockM % kPanelColumns ? 32 : kPanelColumns;  // where keys are rows: of a panel
  static constexpr int kDsBytes = kGroups * kDsPanelBytes;
  static constexpr int kDqPieceBytes = kBlockM / 4 * kPanelColumns * 4;  // dQ of a warp, a panel of columns
  static constexpr int kKeySlots = kPersistent ? 2 : 1;                  // K and V of a tile of keys each
  static constexpr int kKeySlotBytes = 2 * kKeyBytes;
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kQueriesOffset = kKeySlots * kKeySlotBytes;
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kGradStages * kQueryBytes;
  static constexpr int kDqOffset = kDsOffset + kDsStages * kDsBytes;
  static constexpr int kTilesBytes = kDqOffset + kWarpgroupWarps * panels(kHeadDim) * kDqPieceBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kWarpgroupRows == kPanelColumns && (kPersistent || kBlockM == kPanelColumns),
                "dS of a warpgroup's keys is a panel");
  static_assert(kGroups * kShape.registers + kShape.dq_registers <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// A kernel that always takes turns is one of its own: a test for turns in the loop would cost the other calls a tenth.
template <class Element, int kHeadDim, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardConfig : BackwardNarrowConfig<Element, kHeadDim, 2> {
  static constexpr TurnTaking kTurns = kTurns_;
};

template <class Element, int kHeadDim, bool kListsBlocks, bool kBiased>
using BackwardPipelinedBase =
    BackwardNarrowConfig<Element, kHeadDim, 3, kListsBlocks ? BackwardTiling::kBlocks : BackwardTiling::kOfHeadDim,
                         kBiased ? 2 : 3>;
/// The pipelined loop: products of a step overlap those of the next. dS has keys as rows. kBiased: a tile of a bias of
/// query-key pairs takes the room of one stage of dO.
template <class Element, int kHeadDim, bool kListsBlocks = false, bool kBiased_ = false>
struct BackwardPipelinedConfig : BackwardPipelinedBase<Element, kHeadDim, kListsBlocks, kBiased_> {
  using Base = BackwardPipelinedBase<Element, kHeadDim, kListsBlocks, kBiased_>;
  static constexpr TurnTaking kTurns = kListsBlocks ? TurnTaking::kNever : TurnTaking::kIfAsked;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kFindsSteps = false;  // the steps that a mask of pairs leaves
  static constexpr int kDsSteps = 2;  // of dK's product, that take dS from registers: there are not enough for all
  static constexpr int kBiasOffset = Base::kTilesBytes;
  static constexpr int kBiasPanelBytes = kBiased ? panel_bytes(Base::kBlockM) : 0;  // of a warpgroup's keys, in 16 bits
  static constexpr int kTilesBytes = kBiasOffset + Base::kGroups * kBiasPanelBytes;
};

/// The same loop in persistent CTAs: products of one key tile overlap those of the next.
template <class Element, int kHeadDim>
struct BackwardPersistentConfig : BackwardNarrowConfig<Element, kHeadDim, 3, BackwardTiling::kPersistent> {
  using Base = BackwardNarrowConfig<Element, kHeadDim, 3, BackwardTiling::kPersistent>;
  static constexpr TurnTaking kTurns = TurnTaking::kNever;
  static constexpr bool kBiased = false;
  static constexpr bool kFindsSteps = false;
  static constexpr int kDsSteps = Base::kBlockM / 16;
  static constexpr int kDsPanelBytes = Base::kBlockN * Base::kDsQueries * 2;
  static constexpr int kStoresOffset = Base::kTilesBytes;  // dV, then dK, on their way to memory: a place a warp
  static constexpr int kStoreBytes = 16 * kPanelRowBytes;
  static constexpr int kTilesBytes = kStoresOffset + Base::kGroups * kWarpgroupWarps * kStoreBytes;

  static_assert(kStoresOffset % 1024 == 0, "TMA swizzles by address, the stores by row");
  static_assert(Base::kBlockM % kSkippedQueries == 0, "steps from the first visible query on find aligned row terms");
  static_assert(Base::kBlockM / Base::kDsQueries * kDsPanelBytes == Base::kDsBytes, "dS is made of whole panels");
  static_assert(panels(kHeadDim) == 1, "dQ of a step is one product");
};

/// The options that a variant serves, as flags of steps: these and no others, or any.
template <class Base, int kOptions_>
struct BackwardOptionsConfig : Base {
  static constexpr int kOptions = kOptions_;
  static constexpr bool kAny = kOptions == kAnyOptions;

  static constexpr bool may_have(int option) { return kAny || (kOptions & option) != 0; }
  /// Whether a step has the option. Under a mask of pairs some tiles are full.
  template <int kOption>
  __device__ __forceinline__ static bool has(int flags) {
    return may_have(kOption) && ((!kAny && kOption != kStepIsMasked) || (flags & kOption) != 0);
  }
};

template <class Element, int kHeadDim, int kOptions>
using BackwardPipelinedOptionsBase =
    BackwardOptionsConfig<BackwardPipelinedConfig<Element, kHeadDim, false, (kOptions & kStepBiased) != 0>, kOptions>;
/// kTwoWeights: dS is computed from other weights than dV, those before dropout or those times the derivative of a
/// softcap. Both wait in registers for dP. While the weights of the next step are computed, no registers are left for
/// dS, so dK's product reads all of dS from shared memory: 8 KB more per step.
template <class Element, int kHeadDim, int kOptions>
struct BackwardPipelinedOptionsConfig : BackwardPipelinedOptionsBase<Element, kHeadDim, kOptions> {
  static constexpr TurnTaking kTurns = TurnTaking::kNever;
  static constexpr bool kFindsSteps = (kOptions & kStepIsMasked) != 0;
  static constexpr bool kTwoWeights = (kOptions & (kStepDrops | kStepSoftcapped)) != 0;
  static constexpr int kDsSteps = kTwoWeights ? 0 : BackwardPipelinedOptionsBase<Element, kHeadDim, kOptions>::kDsSteps;
};

/// Head dims above kMaxNarrowHeadDim, by clusters of two CTAs with 64 keys each.
template <class Element_, int kHeadDim_, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardWideConfig {
  using Element = Element_;
  static constexpr bool kListsBlocks = false, kPersistent = false;
  static constexpr TurnTaking kTurns = kTurns_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;  // CTAs of a cluster
  static constexpr int kBlockM = kBackwardBlockM;
  static constexpr int kBlockN = kGroups * kWarpgroupRows;  // of a cluster
  static constexpr int kStages = 2;                         // of Q and dO
  static constexpr int kThreads = 3 * kWarpgroupThreads;
  static constexpr int kCluster = kGroups;
  static constexpr int kLoadedKeys = kWarpgroupRows;
  static constexpr int kDqHeadDim = 256;  // of the workspace: row terms are summed up by powers of two

  static constexpr int kPanels = panels(kHeadDim);
  // The CTAs take turns, step by step, at the middle panel of dQ, and so need all of each other's K.
  static constexpr bool kAlternatesMiddlePanel = kPanels % 2 != 0;
  static constexpr int kOtherPanels = kAlternatesMiddlePanel ? kPanels : kPanels / 2;  // of the other CTA's K
  static constexpr int kKeyBytes = tile_bytes(kWarpgroupRows, kHeadDim);               // K, V of a CTA
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);                    // a stage of Q or dO
  static constexpr int kDsBytes = panel_bytes(kBlockM);                                // P, then dS, of a CTA's keys
  static constexpr int kValuesOffset = kKeyBytes;
  static constexpr int kOtherKeysOffset = kValuesOffset + kKeyBytes;
  static constexpr int kQueriesOffset = kOtherKeysOffset + kOtherPanels * panel_bytes(kWarpgroupRows);
  static constexpr int kGradsOffset = kQueriesOffset + kStages * kQueryBytes;
  static constexpr int kDsOffset = kGradsOffset + kStages * kQueryBytes;
  static constexpr int kOtherDsOffset = kDsOffset + kDsBytes;
  static constexpr int kTilesBytes = kOtherDsOffset + kDsBytes;
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile

  static_assert(kGroups == 2, "dS goes to the other CTA");
  static_assert(kWarpgroupRows == kPanelColumns, "dS of a CTA's keys is a panel");
  // The registers that the launch allocates and the other warpgroups leave. With more, setmaxnreg would wait for ever.
  static constexpr int kGradientRegisters = 65536 / kThreads / 8 * 8 * 3 - kShape.registers - kShape.dq_registers;
};

}  // namespace flash_ext::sm90
