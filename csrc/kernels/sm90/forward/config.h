// The shared memory and the limits that follow from a shape of the forward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/host_device.h"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "shape.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_, int kHeadDimV_, ForwardVariant kVariant,
          ForwardTiles kTiles = ForwardTiles::kManyKeys>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of q and k
  static constexpr int kHeadDimV = kHeadDimV_;  // of v and out
  static constexpr bool kScoreOptions = kVariant == ForwardVariant::kScoreOptions,
                        kDrops = kVariant == ForwardVariant::kDropout;
  static constexpr bool kOnlyBias = kVariant == ForwardVariant::kBias, kOnlyMask = kVariant == ForwardVariant::kMask;
  static constexpr bool kGeneral = kVariant == ForwardVariant::kGeneral || kOnlyBias || kOnlyMask || kDrops;
  static constexpr bool kListsBlocks = kVariant == ForwardVariant::kBlocks;
  // A work tile may have a part of the keys alone (split_kv.cuh). Others have no registers left for that at head_dim
  // 256.
  static constexpr bool kSplitsKv = kVariant == ForwardVariant::kPlain;
  static constexpr ForwardShape kShape = kListsBlocks ? forward_blocks_shape({kHeadDim, kHeadDimV})
                                         : kGeneral   ? forward_options_shape({kHeadDim, kHeadDimV}, kVariant)
                                                      : forward_shape({kHeadDim, kHeadDimV}, kTiles);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kGroups * kWarpgroupRows;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kKeyStages = kShape.key_stages;
  static constexpr int kValueStages = kShape.value_stages;
  static constexpr int kRegisters = kShape.registers;
  static constexpr int kProducerRegisters = kShape.producer_registers;
  static constexpr int kKeyParts = kBlockN / kKeyGroup;         // of a tile, in which masks and biases come
  static constexpr int kDrawsBits = kDrops ? kBlockN / 16 : 1;  // groups of keys of Philox, in a tile
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  static constexpr bool kOverlaps = kShape.overlaps;
  // The first V of a CTA waits for its first Q: 2 % of short causal calls at 256; below, it costs 1 to 3 %.
  static constexpr bool kValuesWait = kHeadDim > 128;
  // Softcap without the unit that exponentials need. At 256 that has time for both, and the registers are taken.
  static constexpr bool kCapsByProducts = kHeadDim <= 192;
  // And by fewer of them while scores are small, for which K stays until the exponentials are done: in rings of three
  // or more.
  static constexpr bool kSoftcapsSmallScores = kHeadDim <= 128;
  // Of work tiles: loads run ahead of what is computed, by short sequences too. Where there is no room for so many, 2.
  static constexpr int kSlots = kGeneral && kHeadDim > 128 ? 2 : 4;

  static constexpr int kQueryBytes = tile_bytes(kWarpgroupRows, kHeadDim);  // of a warpgroup
  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);           // of a tile
  static constexpr int kValueBytes = tile_bytes(kBlockN, kHeadDimV);
  static constexpr int kOutBytes = tile_bytes(kWarpgroupRows, kHeadDimV);
  static constexpr bool kOutInRings = kShape.out_in_rings, kOutInShared = !kShape.stores_registers;
  // Room for what draws share comes from the bias.
  static constexpr int kBiasSlots = kShape.bias_slots - (kDrops && kShape.bias_slots != 3 ? 1 : 0);
  // Places of Q: while out of a tile of queries leaves through its Q's slot, the next Q comes into the other.
  static constexpr int kQuerySlots = kOutInRings || !kOutInShared ? 1 : 2;
  // In each slot Q of each warpgroup; stages of K; of V; bias of each warpgroup.
  static constexpr int kQuerySlotBytes = kGroups * kQueryBytes;
  static constexpr int kKeysOffset = kQuerySlots * kQuerySlotBytes;
  static constexpr int kValuesOffset = kKeysOffset + kKeyStages * kKeyBytes;
  static constexpr int kBiasOffset = kValuesOffset + kValueStages * kValueBytes;
  static constexpr int kBiasPartBytes = panel_bytes(kWarpgroupRows);
  // What masks leave of a tile, for each warpgroup and 64 keys; kKeyStages of them.
  static constexpr int kBitsOffset = kBiasOffset + kGroups * kBiasSlots * kBiasPartBytes;
  static constexpr int kBitsBytes = kGeneral ? kGroups * kKeyParts * kWarpgroupRows * 8 : 0;
  static constexpr int kTilesBytes = kBitsOffset + kKeyStages * kBitsBytes;

  // A score 11 above the stabiliser overflows P in float16. Some models give a sequence's first key that much, so the
  // last tile that is visited updates the row stabilisers too: what overflows has to be computed again.
  static constexpr bool kUpdatesRowMaxInLast = std::is_same_v<Element, __half>;

  static_assert(panel_bytes(kBlockN) % kSwizzleBytes == 0 && kBlockN % 16 == 0,
                "tiles are aligned, steps of P V whole");
  static_assert(kGroups * kRegisters + kProducerRegisters <= 65536 / (kThreads * kCtasPerSm) / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg "
                "waits for ever");
  static_assert(kOutInRings || kOutBytes <= kQueryBytes, "out has room where Q was");
  static_assert(!kOutInRings || (kGroups == 2 && kOutBytes <= kKeyBytes && kOutBytes <= kValueBytes),
                "one warpgroup has a stage of K, the other one of V");
};

/// Where a warpgroup's tile of out lies behind the first tile.
template <class Config>
FLASH_EXT_HOST_DEVICE constexpr int out_offset(int group, int rank, int k_stage, int v_stage) {
  if (Config::kOutInRings) {
    return group == 0 ? Config::kKeysOffset + k_stage * Config::kKeyBytes
                      : Config::kValuesOffset + v_stage * Config::kValueBytes;
  }
  return rank * Config::kQuerySlotBytes + group * Config::kQueryBytes;
}

}  // namespace flash_ext::sm90
