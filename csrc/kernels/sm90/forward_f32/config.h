// The shared memory and the limits that follow from a shape of the float32 forward.
#pragma once

#include "kernels/sm90/common/float_parts.cuh"
#include "shape.h"

namespace flash_ext::sm90 {

template <int kHeadDim_, bool kScoreOptions_>
struct ForwardF32Config {
  static constexpr int kHeadDim = kHeadDim_;             // of q, k and v
  static constexpr bool kScoreOptions = kScoreOptions_;  // softcap, ALiBi, any scale
  static constexpr ForwardF32Shape kShape = forward_f32_shape(kHeadDim);
  static constexpr int kWarpgroups = kShape.warpgroups;  // of consumers
  static constexpr int kBlockM = kWarpgroups * kWarpgroupRows;
  static constexpr int kBlockN = kShape.keys;
  static constexpr int kStages = kShape.stages;
  static constexpr int kRegisters = kShape.registers, kProducerRegisters = kShape.producer_registers;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kPanels = panels(kHeadDim);  // subtiles of Q of a warpgroup
  static constexpr bool kSmallSubtiles = kBlockN == kSmallSubtileRows;
  static constexpr int kKeySubtiles = kHeadDim / kBlockN;  // of K of a tile, and as many of V
  static constexpr int kStageBytes = FloatSubtile<kBlockN>::kBytes;

  static constexpr int kQueryBytes = kPanels * kSubtileBytes;  // of a warpgroup
  static constexpr int kRingOffset = kWarpgroups * kQueryBytes;
  static constexpr int kTilesBytes = kRingOffset + kStages * kStageBytes;
  static_assert(kWarpgroupRows == kSubtileRows);
  static_assert(kWarpgroups <= 3, "ForwardF32Barriers has barriers for three");
  static_assert(kWarpgroups * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kWarpgroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

}  // namespace flash_ext::sm90
