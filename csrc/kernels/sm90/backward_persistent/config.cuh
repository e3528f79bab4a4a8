// Tiles, registers and shared memory of the persistent kernel.
#pragma once

#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/turns.cuh"
#include "kernels/sm90/common/backward/config.cuh"

namespace flash_ext::sm90 {

/// The pipelined loop in persistent CTAs: while dQ of the last steps of a key tile is computed and its dK and dV leave,
/// the next tile is loaded and its first products run. kTurns: additions to dQ take turns in a kernel of its own: at
/// head_dim 64 a test for turns would slow down other calls.
template <class Element, int kHeadDim, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardPersistentConfig : BackwardNarrowConfig<Element, kHeadDim, 3, BackwardShapeKind::kPersistent> {
  using Base = BackwardNarrowConfig<Element, kHeadDim, 3, BackwardShapeKind::kPersistent>;
  static constexpr TurnTaking kTurns = kTurns_;
  static constexpr bool kAnchored = kTurns == TurnTaking::kNever;
  static constexpr bool kHasTails = kAnchored;
  static constexpr bool kBiased = false;
  static constexpr bool kFindsSteps = false;
  static constexpr int kDsSteps = Base::kBlockM / 16;
  static constexpr int kDsPanelBytes = Base::kBlockN * Base::kDsQueries * 2;
  static constexpr int kStoresOffset = Base::kTilesBytes;  // for dV, then dK, on their way to memory: a slot per warp
  static constexpr int kStoreBytes = kRowsOfWarp * kPanelRowBytes;
  static constexpr int kTilesBytes = kStoresOffset + Base::kWarpgroups * kWarpgroupWarps * kStoreBytes;
  static constexpr bool kHasOptions = false, kZeroesDq = kTurns == TurnTaking::kNever;
  static constexpr int kLoadingWarps = 2;  // of the dQ warpgroup, the first ones
  static constexpr bool may_have(int) { return false; }

  static_assert(kStoresOffset % 1024 == 0, "TMA swizzles by address, the stores by row");
  static_assert(Base::kBlockM % kSkippedQueries == 0, "steps from the first visible query on find aligned row terms");
  static_assert(Base::kBlockM / Base::kDsQueries * kDsPanelBytes == Base::kDsBytes, "dS is made of whole panels");
  static_assert(panels(kHeadDim) == 1, "dQ of a step is one product");
};

/// The persistent kernel with one option. kTwoWeights, kDsSteps: as in the pipelined loop of one tile
/// (BackwardPipelinedOptionsConfig).
template <class Element, int kHeadDim, int kOptions>
struct BackwardPersistentOptionsConfig : BackwardOptionsConfig<BackwardPersistentConfig<Element, kHeadDim>, kOptions> {
  using Base = BackwardOptionsConfig<BackwardPersistentConfig<Element, kHeadDim>, kOptions>;
  static constexpr bool kHasOptions = true;
  static constexpr bool kHasTails = false;
  static constexpr bool kTwoWeights = (kOptions & kStepSoftcapped) != 0;
  static constexpr int kDsSteps = kTwoWeights ? 0 : Base::kDsSteps - 2;
};

}  // namespace flash_ext::sm90
