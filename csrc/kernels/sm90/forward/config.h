// What follows from a shape of the forward: its shared-memory plan and its limits.
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
          ForwardTiles kTiling = ForwardTiles::kManyKeys>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;    // of q and k
  static constexpr int kHeadDimV = kHeadDimV_;  // of v and out
  static constexpr bool kScoreOptions = kVariant == ForwardVariant::kScoreOptions,
                        kDrops = kVariant == ForwardVariant::kDropout;
  static constexpr bool kOnlyBias = kVariant == ForwardVariant::kBias, kOnlyMask = kVariant == ForwardVariant::kMask;
  // Bias, masks or dropout: the producers look for the key tiles in which masks leave something visible.
  static constexpr bool kVisible = kVariant == ForwardVariant::kAllButDropout || kOnlyBias || kOnlyMask || kDrops;
  static constexpr bool kListsBlocks = kVariant == ForwardVariant::kBlocks;
  static constexpr bool kReadsCache = kVariant == ForwardVariant::kCache;
  static constexpr bool kKeepsMaxLogit = kVariant == ForwardVariant::kMaxLogit;
  // A work tile may have only a part of its keys (split_kv.cuh). Other variants have no registers for that at 256.
  static constexpr bool kSplitsKv = kVariant == ForwardVariant::kPlain || kReadsCache || kKeepsMaxLogit;
  static constexpr ForwardShape kShape = kListsBlocks ? forward_blocks_shape({kHeadDim, kHeadDimV})
                                         : kVisible   ? forward_options_shape({kHeadDim, kHeadDimV}, kVariant)
                                                      : forward_shape({kHeadDim, kHeadDimV}, kTiling);
  static constexpr int kWarpgroups = kShape.warpgroups;  // of consumers
  static constexpr int kBlockM = kWarpgroups * kWarpgroupRows;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kKeyStages = kShape.key_stages;
  static constexpr int kValueStages = kShape.value_stages;
  static constexpr int kRegisters = kShape.registers;
  static constexpr int kProducerRegisters = kShape.producer_registers;
  static constexpr int kKeyParts = kBlockN / kKeyGroup;               // parts of a tile; masks and biases come in parts
  static constexpr int kRandomKeyGroups = kDrops ? kBlockN / 16 : 1;  // Philox's groups of keys in a tile
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;
  static constexpr bool kOverlaps = kShape.overlaps;
  // In ForwardProducer warp 2 loads V, as warp 0 would not start all copies of K and V in time: listed tiles take
  // longer to find, and at 256 a tile of K or V takes four. Gains up to 6 %; at 192 it loses as often as it gains. In
  // ForwardVisibleProducer warp 2 always loads V.
  static constexpr bool kLoadsValuesApart = kListsBlocks || kHeadDim > 192;
  // The first V of a CTA is loaded after its first Q. Gains 2 % in short causal calls at 256; below it loses 1 to 3 %.
  static constexpr bool kValuesWait = kHeadDim > 128;
  // Softcap by a polynomial, without the MUFU unit that exponentials need. At 256 the unit has time for both, and no
  // registers are free.
  static constexpr bool kCapsByProducts = kHeadDim <= 192;
  // The small-score path: a shorter polynomial. It needs three stages of K, because it releases K only after the
  // exponentials.
  static constexpr bool kSoftcapsSmallScores = kHeadDim <= 128;
  // Slots of work tiles. Four let loads run ahead of the computation by several short sequences; two where shared
  // memory is short.
  static constexpr int kSlots = kVisible && kHeadDim > 128 ? 2 : 4;

  static constexpr int kQueryBytes = tile_bytes(kWarpgroupRows, kHeadDim);  // of a warpgroup
  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);           // of a tile
  static constexpr int kValueBytes = tile_bytes(kBlockN, kHeadDimV);
  static constexpr int kOutBytes = tile_bytes(kWarpgroupRows, kHeadDimV);
  static constexpr bool kOutInRings = kShape.out_in_rings, kOutInShared = !kShape.stores_registers;
  // With dropout, the random bits of keys (ForwardVisibleStorage) take the room of one part of a bias per warpgroup,
  // except where a warpgroup has room for three.
  static constexpr int kBiasSlots = kShape.bias_slots - (kDrops && kShape.bias_slots != 3 ? 1 : 0);
  // Slots of Q: while out of a query tile leaves through its Q's slot, the next Q is loaded into the other.
  static constexpr int kQuerySlots = kOutInRings || !kOutInShared ? 1 : 2;
  // The layout of shared memory: slots of Q, each with Q of every warpgroup; stages of K; of V; bias tiles of every
  // warpgroup; bits.
  static constexpr int kQuerySlotBytes = kWarpgroups * kQueryBytes;
  static constexpr int kKeysOffset = kQuerySlots * kQuerySlotBytes;
  static constexpr int kValuesOffset = kKeysOffset + kKeyStages * kKeyBytes;
  static constexpr int kBiasOffset = kValuesOffset + kValueStages * kValueBytes;
  static constexpr int kBiasPartBytes = panel_bytes(kWarpgroupRows);
  // Mask bits of a key tile: PairBits for each warpgroup and each 64 keys. Every stage of K has room for them.
  static constexpr int kBitsOffset = kBiasOffset + kWarpgroups * kBiasSlots * kBiasPartBytes;
  static constexpr int kBitsBytes = kVisible ? kWarpgroups * kKeyParts * kWarpgroupRows * 8 : 0;
  static constexpr int kTilesBytes = kBitsOffset + kKeyStages * kBitsBytes;

  // A score 11 above the stabiliser overflows P in float16, and an overflow costs a recomputation. Some models give the
  // first key of a sequence such scores, so the last visited tile updates the row stabilisers too.
  static constexpr bool kUpdatesRowMaxInLast = std::is_same_v<Element, __half>;

  static_assert(panel_bytes(kBlockN) % kSwizzleBytes == 0 && kBlockN % 16 == 0,
                "tiles are aligned, steps of P V whole");
  static_assert(kWarpgroups * kRegisters + kProducerRegisters <=
                    65536 / (kThreads * kCtasPerSm) / 8 * 8 * (kWarpgroups + 1),
                "no more registers than the launch allocates, else setmaxnreg "
                "waits for ever");
  static_assert(kOutInRings || kOutBytes <= kQueryBytes, "out has room where Q was");
  static_assert(!kOutInRings || (kWarpgroups == 2 && kOutBytes <= kKeyBytes && kOutBytes <= kValueBytes),
                "one warpgroup has a stage of K, the other one of V");
};

/// The offset of a warpgroup's tile of out from the first tile in shared memory.
template <class Config>
FLASH_EXT_HOST_DEVICE constexpr int out_offset(int group, int rank, int k_stage, int v_stage) {
  if (Config::kOutInRings) {
    return group == 0 ? Config::kKeysOffset + k_stage * Config::kKeyBytes
                      : Config::kValuesOffset + v_stage * Config::kValueBytes;
  }
  return rank * Config::kQuerySlotBytes + group * Config::kQueryBytes;
}

}  // namespace flash_ext::sm90
