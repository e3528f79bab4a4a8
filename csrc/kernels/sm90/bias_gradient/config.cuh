// Constants of an instantiation of the bias gradient.
#pragma once

#include "kernels/common/score/bias_tile.cuh"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_>
struct BiasConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarpgroups = 2;  // of consumers
  static constexpr int kRows = kWarpgroups * kWarpgroupRows, kKeys = 128;
  static constexpr int kSlabs = panels(kHeadDim);  // of S, and of dP
  static constexpr int kStages = 4, kSlots = 4, kFinders = 3;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kRegisters = 240, kProducerRegisters = 24;
  static constexpr int kRowBytes = panel_bytes(kRows), kKeyBytes = panel_bytes(kKeys);  // of a slab
  static constexpr int kStageBytes = kRowBytes + kKeyBytes;
  static constexpr int kSlabsBytes = kStages * kStageBytes;
  static constexpr int kWarps = kWarpgroups * kWarpgroupWarps;  // of consumers
  using Bias = BiasTile<16, kKeys>;                             // of a warp
  // Products of dP are issued while products of S are still in flight, if the slabs of both fit.
  static constexpr bool kOverlap = 2 * kSlabs <= kStages;

  static_assert(kSlabs <= kStages, "a product releases its slabs when it has all of them");
  static_assert(kWarpgroups * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kWarpgroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
  // A finder fills the slot of every kFinders-th step n. By the parity of the slot's barrier it waits until step
  // n - kSlots has been read. The parity alone cannot tell that step from step n - 3 kSlots. But the finder has already
  // waited, in its step before, until step n - kFinders - kSlots was read, and with it all steps up to n - 2 kSlots.
  static_assert(kFinders <= kSlots, "a finder may miss a use of a slot, and its parity repeats");
};

}  // namespace flash_ext::sm90
