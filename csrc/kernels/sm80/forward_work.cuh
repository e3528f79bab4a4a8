// Tiles and shared memory of the forward, and what a block of it works on.
#pragma once

#include "../common/scores.cuh"
#include "../common/sequence.cuh"
#include "config.h"
#include "tile.cuh"

namespace flash_ext::sm80 {

/// kGeneral: scores that are more than scaled products within a window (bias, mask, softcap, ALiBi, dropout), or keys
/// that do not lie in one piece. kSmall: fits into the shared memory of every GPU.
template <class Element_, int kHeadDim_, bool kGeneral_, bool kSmall_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr bool kWide = kHeadDim == 256;
  // 32 rows a warp halve the shared-memory reads of K and V per product; at 256 the accumulators leave no room for it.
  static constexpr int kWarpRows = kWide ? 16 : 32;
  static constexpr int kWarps = kWide && !kSmall_ ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockM = kWarps * kWarpRows;
  static constexpr int kBlockN = 64;
  // K of the next tile comes while P is computed and multiplied; at 64 that is too short a time.
  static constexpr int kStages = kHeadDim == 64 ? 2 : 1;
  static constexpr int kBlocksPerSm = kWide && !kSmall_ ? 1 : 2;
  static constexpr bool kQueryInRegisters = kHeadDim == 64;
  // Options leave no register for watching sums; beside what they cost the maximum is cheap.
  static constexpr bool kRunningMaximum = kGeneral;
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;

  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kTileBytes = Layout::bytes(kBlockN);
  static constexpr int kVisibilityBytes = kGeneral ? kBlockM * (kBlockN / 32) * 4 : 0;  // of one tile
  static constexpr int kTilesBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kWorkBytes = 256;
  static constexpr int kSharedBytes = kTilesBytes + kWorkBytes + 2 * kVisibilityBytes;
  static_assert(!kSmall_ || kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
};

/// What a block works on. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct ForwardWork {
  using Element = typename Config::Element;
  Sequence sequence;
  RowSource<Element, Config::kGeneral> keys, values;
  int first_query;
  TileSpan tiles;
  float scale;                  // of scores, to base 2; kGeneral has applied it already
  bool met_non_finite = false;  // in a tile that is not visible to all

  __device__ __forceinline__ ForwardWork(const ForwardParams& p, int batch, int head, int first_query)
      : sequence(p, batch, head),
        keys(key_rows<Element, Config::kGeneral>(p, p.k, sequence)),
        values(key_rows<Element, Config::kGeneral>(p, p.v, sequence)),
        first_query(first_query),
        scale(Config::kGeneral ? 1.0f : static_cast<float>(p.softmax_scale) * kLog2E) {
    tiles = sequence.key_tiles<Config::kBlockN>(first_query, min(first_query + Config::kBlockM, sequence.seqlen_q));
    static_assert(sizeof(ForwardWork) <= Config::kWorkBytes, "the shared-memory plan has room for it");
  }
};

/// A tile that a mask may hide in part.
struct MaskedTile {
  int tile;
  bool partly;  // hidden by a mask, which its words of visibility then say
};

}  // namespace flash_ext::sm80
