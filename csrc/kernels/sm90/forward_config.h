// The shared memory and the limits that follow from a shape of the forward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../common/host_device.h"
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
  static constexpr bool kOutInKeys = kShape.out_in_keys;
  // Q of each warpgroup; stages of K; of V; out of each warpgroup.
  static constexpr int kKeysOffset = kGroups * kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kTileBytes;
  static constexpr int kOutOffset = kValuesOffset + kStages * kTileBytes;
  static constexpr int kTilesBytes = kOutOffset + (kOutInKeys ? 0 : kGroups * kQueryBytes);

  // How far below 1 the largest P of the first tile lies, to base 2. Float16 has room for 2^16 above, which some heads
  // need more of; 2^-8 costs no precision that counts: a P of 2^-24 is then off by 2^-17 of the largest at most.
  static constexpr float kHeadroom = std::is_same_v<Element, __half> ? 8.0f : 0.0f;

  static_assert(kTileBytes % kSwizzleBytes == 0 && kBlockN % 16 == 0, "tiles are aligned, steps of P V whole");
  static_assert(kGroups * kRegisters + kLoaderRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg "
                "waits for ever");
  static_assert(!kOutInKeys || (kGroups == 2 && kQueryBytes <= kTileBytes), "two warpgroups take turns with a stage");
};

/// Where a warpgroup's tile of out lies behind the first tile.
template <class Config>
FLASH_EXT_HOST_DEVICE constexpr int out_offset(int group, int k_stage) {
  if (Config::kOutInKeys) return Config::kKeysOffset + k_stage * Config::kTileBytes;
  return Config::kOutOffset + group * Config::kQueryBytes;
}

}  // namespace flash_ext::sm90
