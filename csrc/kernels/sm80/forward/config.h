// Tiles of a variant of the forward, and what it has registers for.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/common/tile.cuh"
#include "kernels/sm80/common/config.h"
#include "shape.h"

namespace flash_ext::sm80 {

/// kSmall: fits into the shared memory of every GPU.
template <class Element_, int kHeadDim_, ForwardVariant kVariant, bool kSmall_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kReads = kVariant == ForwardVariant::kReads;
  static constexpr bool kOptionBranches = kReads || kVariant == ForwardVariant::kComputes;  // by branches
  static constexpr bool kOneBias = kVariant == ForwardVariant::kBias || kVariant == ForwardVariant::kFloatBias;
  static constexpr bool kOneDropout = kVariant == ForwardVariant::kDrops;
  using BiasElement = std::conditional_t<kVariant == ForwardVariant::kFloatBias, float, Element>;  // of kOneBias
  static constexpr bool kOneMask = kVariant == ForwardVariant::kMask, kComputes = kVariant == ForwardVariant::kComputes;
  static constexpr bool kBiases = kReads || kOneBias, kMasks = kReads || kOneMask;
  static constexpr bool kDropout = kOptionBranches || kOneDropout;
  static constexpr bool kDropsByBranch = kReads || (kOptionBranches && kHeadDim_ == 256);  // as variant_of() says
  static constexpr bool kFloat = sizeof(Element) == 4;
  static constexpr bool kWide = kHeadDim == 256;
  static constexpr ForwardShape kShape = forward_shape(kHeadDim, kFloat, kVariant, kSmall_);
  static constexpr int kWarpRows = kShape.warp_rows;
  static constexpr int kWarps = kShape.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockM = kShape.block_m();
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStages = kShape.stages;
  static constexpr int kCtasPerSm = kWide && !kSmall_ ? 1 : 2;
  static constexpr bool kQueryInRegisters = kHeadDim == 64 && !kFloat;
  // Where registers are short, addresses are computed again in every step: of the copies (kRematerialisesThread), or of
  // all that a lane reads (kRematerialisesLane).
  static constexpr bool kFullPrecision = std::is_same_v<Element, float>;
  static constexpr bool kRematerialisesThread =
      (kHeadDim == 128 && kVariant != ForwardVariant::kPlain && !kReads && !kOneBias) || (kWide && kFullPrecision);
  static constexpr bool kRematerialisesLane =
      (kWide && kFullPrecision && kVariant == ForwardVariant::kPlain) || (kHeadDim == 128 && (kOneMask || kOneDropout));
  static constexpr bool kLoadsMaskEarly = kHeadDim == 64;  // the bits then stay in registers while a step begins
  // With three TF32 products for one, the unrolled code of a tile is longer than the instruction cache.
  static constexpr int kUnroll = std::is_same_v<Element, float> ? 1 : 16;
  static constexpr bool kFenced = (kUnroll == 1 && kWide) || (kHeadDim == 128 && kComputes);
  static constexpr bool kRunningMaximum = kFloat && (kOptionBranches || kWide);
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  // A row with a smaller sum has lost the weights that it sums up.
  static constexpr float kLeastSum = std::is_same_v<Element, __half> ? 0x1p-2f : 0x1p-40f;

  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kTileBytes = Layout::bytes(kBlockN);
  static constexpr int kTilesBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kWorkTileBytes = kForwardWorkTileBytes;
  static constexpr int kSharedBytes = kTilesBytes + kWorkTileBytes;  // without what options need
  static_assert(kSharedBytes == forward_shared_bytes(kShape, kHeadDim, kFloat), "which the plan goes by");
  static constexpr int kRandomBytes = kBlockN / 16 * 16;  // KeyRandomBits of a tile
  static_assert(!kSmall_ || kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
  static_assert(!kOneBias ||
                    kSharedBytes + kBlockM * kBlockN * static_cast<int>(sizeof(BiasElement)) <= kSmallestSharedBytes,
                "with the bias as well");
};

}  // namespace flash_ext::sm80
