// The shared memory and the limits that follow from a shape of the forward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "forward_shape.h"
#include "matrix_descriptor.h"

namespace flash_ext::sm90 {

/// kOptions: scores that are more than products scaled by a positive number (softcap, ALiBi).
template <class Element_, int kHeadDim_, bool kOptions_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kOptions = kOptions_;
  static constexpr ForwardShape kShape = forward_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kGroups * kGroupRows;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStages = kShape.stages;
  static constexpr int kRegisters = kShape.registers;
  static constexpr int kLoaderRegisters = kShape.loader_registers;
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kSlots = 4;  // of work: loads run ahead of what is computed, by short sequences too

  static constexpr int kQueryBytes = tile_bytes(kGroupRows, kHeadDim);  // of a warpgroup
  static constexpr int kTileBytes = tile_bytes(kBlockN, kHeadDim);      // of K or V
  static constexpr int kTilesBytes = kGroups * kQueryBytes + 2 * kStages * kTileBytes;

  // P must stay finite as an Element, l and out in float; beyond it the reference is raised.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p40f;

  static_assert(kTileBytes % kSwizzleBytes == 0 && kBlockN % 16 == 0, "tiles are aligned, steps of P V whole");
  static_assert(kGroups * kRegisters + kLoaderRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg "
                "waits for ever");
};

}  // namespace flash_ext::sm90
