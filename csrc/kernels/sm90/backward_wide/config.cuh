// Tiles, registers and shared memory of the kernel for wide heads.
#pragma once

#include <cstdint>

#include "kernels/common/backward/turns.cuh"
#include "kernels/sm90/common/backward/config.cuh"
#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/common/backward/variant.h"
#include "kernels/sm90/common/matrix_descriptor.h"

namespace flash_ext::sm90 {

/// Head dims above kMaxNarrowHeadDim, by clusters of two CTAs with 64 keys each.
template <class Element_, int kHeadDim_, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardWideConfig {
  using Element = Element_;
  static constexpr bool kHasOptions = false, kZeroesDq = kTurns_ == TurnTaking::kNever;
  static constexpr bool kFirstTurnsStore = false;  // a fence waits longer for stores: 2 % slower
  static constexpr bool kListsBlocks = false, kPersistent = false, kAnchored = false, kHasTails = false;
  static constexpr TurnTaking kTurns = kTurns_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim);
  static constexpr int kBlockM = kBackwardBlockM;
  static constexpr int kCluster = kShape.key_groups;  // CTAs, with kWarpgroupRows keys each
  static constexpr int kBlockN = kCluster * kWarpgroupRows;
  static constexpr int kStages = 2;  // of Q and dO
  static constexpr int kThreads = 3 * kWarpgroupThreads;
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

  static_assert(kCluster == 2, "dS goes to the other CTA");
  static_assert(kWarpgroupRows == kPanelColumns, "dS of a CTA's keys is a panel");
  static constexpr int kValueRegisters = kShape.registers;  // of the warpgroup of S and dV
  // The registers that the launch allocates and the other warpgroups leave. With more, setmaxnreg would wait for ever.
  static constexpr int kGradientRegisters = 65536 / kThreads / 8 * 8 * 3 - kValueRegisters - kShape.dq_registers;
};

/// The variant for these options, as StepFlags, or with kAnyOptions for any.
template <class Element, int kHeadDim, int kOptions>
struct BackwardWideOptionsConfig : BackwardOptionsConfig<BackwardWideConfig<Element, kHeadDim>, kOptions> {
  using Base = BackwardOptionsConfig<BackwardWideConfig<Element, kHeadDim>, kOptions>;
  static constexpr bool kHasOptions = true;
  // With any options, the scores need more registers, and the warpgroup of dK spares them.
  static constexpr int kMoreRegisters = Base::kAny ? 8 : 0;
  static constexpr int kValueRegisters = Base::kValueRegisters + kMoreRegisters;
  static constexpr int kGradientRegisters = Base::kGradientRegisters - kMoreRegisters;
  // The passes over scores, and over dS, go over a part of a tile's queries each: with any options, or a bias read by
  // elements, which takes a 32-bit register each, registers do not suffice for what they keep beside the scores of a
  // whole tile.
  static constexpr bool kReadsElements = !Base::kAny && (kOptions & kStepOfElements) != 0;
  static constexpr int kParts = !Base::kAny && !kReadsElements ? 1 : kHeadDim == 192 ? 2 : 4;
  static constexpr int kQueriesOfPart = Base::kBlockM / kParts;
};

}  // namespace flash_ext::sm90
