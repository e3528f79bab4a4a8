// Constants of an instantiation of the backward: tile shapes, and the layout of shared memory.
#pragma once

#include <type_traits>

#include "kernels/common/backward/dq_store.cuh"
#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/sm80/common/config.h"
#include "shape.h"

namespace flash_ext::sm80 {

/// kHasOptions: scores have options (bias, mask, softcap, ALiBi, dropout); else they are scaled products in a window.
/// kSmall: fits into the shared memory of every GPU.
template <class Element_, int kHeadDim_, bool kHasOptions_, bool kSmall_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kHasOptions = kHasOptions_;
  // dK and dV of the CTA's keys are 128 registers of a thread, 64 at head_dim 64.
  static constexpr bool kFloat = sizeof(Element) == 4;
  static constexpr BackwardShape kShape = backward_shape(kHeadDim, kFloat, kHasOptions, kSmall_);
  static constexpr int kWarps = kShape.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRoleWarps = kWarps / 2;
  static constexpr int kWarpKeys = 32;  // as many as one word of visibility covers
  static constexpr int kBlockM = kShape.block_m, kBlockN = kShape.block_n;
  static constexpr int kCtasPerSm = 1;
  // With three TF32 products for one, the unrolled code of a tile is longer than the instruction cache.
  static constexpr int kUnroll = std::is_same_v<Element, float> ? 1 : 16;

  static constexpr int kWarpsAlongKeys = kBlockN / kWarpKeys;
  // So many warps share keys. They divide the queries of S or dP among them, and then the columns of dV or dK.
  static constexpr int kSides = kRoleWarps / kWarpsAlongKeys;
  static constexpr int kWarpQueries = kBlockM / kSides;
  static constexpr int kWarpColumns = kHeadDim / kSides;
  static_assert(kSides * kWarpsAlongKeys == kRoleWarps && kWarpQueries % 16 == 0 && kWarpColumns % 16 == 0);

  using Layout = TileLayout<Element, kHeadDim>;
  using ScoreLayout = TileLayout<Element, kBlockM>;
  using Dq = DqLayout<kBlockM, kHeadDim, kWarps>;
  static constexpr int kKeyBytes = Layout::bytes(kBlockN);
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kScoreBytes = ScoreLayout::bytes(kBlockN);
  static constexpr int kTermBytes = kBlockM * 4;  // lse or D of a tile
  static constexpr int kWordBytes = kHasOptions ? kBlockM * kWarpsAlongKeys * 4 : 0;
  static constexpr int kKeptBytes = kHasOptions ? KeptTile<kBlockM>::bytes(kBlockN) : 0;  // of dropout
  // Where warps share keys, P^T is read for dV while dS^T is written: it has a tile of its own.
  static constexpr int kScoreTiles = kSides == 1 ? 2 : 3;
  static constexpr int kTilesBytes = 2 * kKeyBytes + 3 * kQueryBytes + kScoreTiles * kScoreBytes;
  static constexpr int kWorkTileBytes = 512;
  static constexpr int kSharedBytes =
      kTilesBytes + 3 * kTermBytes + kWordBytes + 2 * kKeptBytes + kWorkTileBytes;  // without a bias
  static constexpr BackwardTiling kTiling = kSmall_       ? BackwardTiling::kSmall
                                            : kHasOptions ? BackwardTiling::kAllOptions
                                                          : BackwardTiling::kPlain;
  static_assert(kSharedBytes == backward_shared_bytes(kHeadDim, kFloat, kTiling), "which the plan goes by");
  static_assert(!kSmall_ || kSharedBytes + TileLayout<float, kBlockN>::bytes(kBlockM) <= kSmallestSharedBytes,
                "every GPU must be able to launch it, with a bias too");
};

}  // namespace flash_ext::sm80
