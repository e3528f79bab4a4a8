// Tiles, registers and shared memory of the pipelined loop.
#pragma once

#include "kernels/common/backward/turns.cuh"
#include "kernels/sm90/common/backward/config.cuh"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim, bool kListsBlocks, bool kBiased>
using BackwardPipelinedBase =
    BackwardNarrowConfig<Element, kHeadDim, 3,
                         kListsBlocks ? BackwardShapeKind::kBlocks : BackwardShapeKind::kOfHeadDim, kBiased ? 2 : 3>;
/// The pipelined loop: products of a step overlap those of the next. dS has keys as rows. kBiased: a tile of a bias of
/// query-key pairs takes the room of one stage of dO.
template <class Element, int kHeadDim, bool kListsBlocks = false, bool kBiased_ = false>
struct BackwardPipelinedConfig : BackwardPipelinedBase<Element, kHeadDim, kListsBlocks, kBiased_> {
  using Base = BackwardPipelinedBase<Element, kHeadDim, kListsBlocks, kBiased_>;
  static constexpr TurnTaking kTurns = kListsBlocks ? TurnTaking::kNever : TurnTaking::kIfAsked;
  static constexpr bool kBiased = kBiased_;
  static constexpr bool kZeroesDq = !kListsBlocks;
  static constexpr int kLoadingWarps = kBiased ? 3 : 2;  // of the dQ warpgroup, the first ones
  static constexpr bool kFindsSteps = false;             // whether a mask of pairs leaves out steps
  static constexpr bool kSkipsTurns = false;             // whether CTAs whose keys are all hidden pass turns
  static constexpr int kDsSteps = 2;  // of dK's product, with dS in registers, which do not suffice for all
  static constexpr int kBiasOffset = Base::kTilesBytes;
  static constexpr int kBiasPanelBytes = kBiased ? panel_bytes(Base::kBlockM) : 0;  // of a warpgroup's keys, in 16 bits
  static constexpr int kTilesBytes = kBiasOffset + Base::kWarpgroups * kBiasPanelBytes;
};

template <class Element, int kHeadDim, int kOptions>
using BackwardPipelinedOptionsBase =
    BackwardOptionsConfig<BackwardPipelinedConfig<Element, kHeadDim, false, (kOptions & kStepBiased) != 0>, kOptions>;
/// kTwoWeights: dS is computed from other weights than dV, those before dropout or those times the derivative of a
/// softcap. Both wait in registers for dP. While the weights of the next step are computed, no registers are left for
/// dS, so dK's product reads all of dS from shared memory: 8 KB more per step.
/// kTurns: additions to dQ take turns in a kernel of its own: the registers of some variants leave no room for a test.
template <class Element, int kHeadDim, int kOptions, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardPipelinedOptionsConfig : BackwardPipelinedOptionsBase<Element, kHeadDim, kOptions> {
  static constexpr TurnTaking kTurns = kTurns_;
  static constexpr bool kZeroesDq = kTurns == TurnTaking::kNever;
  static constexpr bool kFindsSteps = (kOptions & kStepMasked) != 0;
  static constexpr bool kSkipsTurns = kTurns != TurnTaking::kNever && (kOptions & kStepKeyBiased) != 0;
  static constexpr bool kTwoWeights = (kOptions & (kStepDrops | kStepSoftcapped)) != 0;
  static constexpr int kDsSteps = kTwoWeights ? 0 : BackwardPipelinedOptionsBase<Element, kHeadDim, kOptions>::kDsSteps;
};

}  // namespace flash_ext::sm90
