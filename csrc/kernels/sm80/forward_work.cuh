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
  static constexpr bool kFloat = sizeof(Element) == 4;
  static constexpr bool kWide = kHeadDim == 256;
  // 32 rows a warp halve the shared-memory reads of K and V per product; at 256 the accumulators leave no room for it.
  // Nor do options at 128; there three blocks on an SM make up for it.
  static constexpr bool kThin = kGeneral && kHeadDim == 128;
  static constexpr int kWarpRows = kWide || kThin ? 16 : 32;
  static constexpr int kWarps = kFloat ? (kWide && kSmall_ ? 2 : 4) : kWide && !kSmall_ ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockM = kWarps * kWarpRows;
  static constexpr int kBlockN = kFloat ? 32 : 64;
  // K of the next tile comes while P is computed and multiplied; at 64 that is too short a time.
  static constexpr int kStages = kHeadDim == 64 && !kGeneral && !kFloat ? 2 : 1;
  static constexpr int kBlocksPerSm = kThin && !kFloat ? 3 : kWide && !kSmall_ ? 1 : 2;
  static constexpr bool kQueryInRegisters = kHeadDim == 64 && !kFloat;
  // With three TF32 products for one, the unrolled code of a tile is longer than the instruction cache.
  static constexpr int kUnroll = std::is_same_v<Element, float> ? 1 : 16;
  static constexpr bool kFenced = kUnroll == 1 && kWide;
  // Options leave no register for watching sums; beside what they cost the maximum is cheap.
  static constexpr bool kRunningMaximum = kGeneral || (kFloat && kWide);
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;

  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kTileBytes = Layout::bytes(kBlockN);
  static constexpr int kVisibilityBytes = kGeneral ? kBlockM * (kBlockN / 32) * 4 : 0;  // of one tile
  static constexpr int kTilesBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kWorkBytes = 384;  // a multiple of 128, to which tiles are aligned
  static constexpr int kSharedBytes = kTilesBytes + kWorkBytes + 2 * kVisibilityBytes;  // without a tile of the bias
  static_assert(!kSmall_ || kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
};

/// What the options of one head come to.
template <class Element>
struct ForwardOptions {
  ScoreRules<Element> rules;
  Dropout dropout;
  bool stages_bias;

  __device__ __forceinline__ ForwardOptions(const AttentionParams& p, const Sequence& sequence, bool stages_bias)
      : rules(p, sequence), dropout(p, sequence), stages_bias(stages_bias) {}
};

struct NoOptions {
  __device__ __forceinline__ NoOptions(const AttentionParams&, const Sequence&, bool) {}
};

/// What a block works on. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct ForwardWork {
  using Element = typename Config::Element;
  Sequence sequence;
  RowSource<Element, Config::kGeneral> keys, values;
  std::conditional_t<Config::kGeneral, ForwardOptions<Element>, NoOptions> options;
  int first_query;
  TileSpan tiles;
  float scale;                  // of scores, to base 2; kGeneral has applied it already
  bool met_non_finite = false;  // in a tile that is not visible to all

  __device__ __forceinline__ ForwardWork(const ForwardParams& p, int batch, int head, int first_query, bool stages_bias)
      : sequence(p, batch, head),
        keys(key_rows<Element, Config::kGeneral>(p, p.k, sequence)),
        values(key_rows<Element, Config::kGeneral>(p, p.v, sequence)),
        options(p, sequence, stages_bias),
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
