// Tiles and shared memory of the forward, and what a block of it works on.
#pragma once

#include "../common/scores.cuh"
#include "../common/sequence.cuh"
#include "config.h"
#include "tile.cuh"

namespace flash_ext::sm80 {

/// What a kernel can do. A class has all that the one before it has: each costs registers, and 128 has none to spare.
enum class ForwardClass {
  kPlain,     // scaled products within a window
  kComputes,  // softcap, ALiBi, dropout, any scale
  kReads,     // bias, masks, and keys that do not lie in one piece
};

/// kSmall: fits into the shared memory of every GPU.
template <class Element_, int kHeadDim_, ForwardClass kClass, bool kSmall_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kOptions = kClass != ForwardClass::kPlain, kReads = kClass == ForwardClass::kReads;
  static constexpr bool kFloat = sizeof(Element) == 4;
  static constexpr bool kWide = kHeadDim == 256;
  // 32 rows a warp halve the shared-memory reads of K and V per product; at 256 the accumulators leave no room for it.
  static constexpr int kWarpRows = kWide || (kFloat && kReads && kHeadDim == 128) ? 16 : 32;
  static constexpr int kWarps = kFloat ? (kWide && kSmall_ ? 2 : 4) : kWide && !kSmall_ ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlockM = kWarps * kWarpRows;
  static constexpr int kBlockN = kFloat || (kHeadDim == 128 && kReads) ? 32 : 64;
  // K of the next tile comes while P is computed and multiplied; at 64 that is too short a time.
  static constexpr int kStages = (kHeadDim == 64 || (kHeadDim == 128 && kReads)) && !kFloat ? 2 : 1;
  static constexpr int kBlocksPerSm = kWide && !kSmall_ ? 1 : 2;
  static constexpr bool kQueryInRegisters = kHeadDim == 64 && !kFloat;
  // Where addresses must be computed again in every step, of the copies or of all that a lane reads.
  static constexpr bool kFullPrecision = std::is_same_v<Element, float>;
  static constexpr bool kForgetsThread =
      (kHeadDim == 128 && kClass == ForwardClass::kComputes) || (kWide && kFullPrecision);
  static constexpr bool kForgetsLane = kWide && kFullPrecision && kClass == ForwardClass::kPlain;
  // With three TF32 products for one, the unrolled code of a tile is longer than the instruction cache.
  static constexpr int kUnroll = std::is_same_v<Element, float> ? 1 : 16;
  static constexpr bool kFenced = kUnroll == 1 && kWide;
  static constexpr bool kRunningMaximum = kFloat && (kOptions || kWide);
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  // A smaller sum of a row has lost what it is a sum of.
  static constexpr float kLeastSum = std::is_same_v<Element, __half> ? 0x1p-2f : 0x1p-40f;

  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kTileBytes = Layout::bytes(kBlockN);
  static constexpr int kTilesBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kWorkBytes = 384;                         // a multiple of 128, to which tiles are aligned
  static constexpr int kSharedBytes = kTilesBytes + kWorkBytes;  // without what options need
  // Words of visibility of two tiles, and the bytes that become them.
  static constexpr int kVisibilityBytes = kBlockM * (kBlockN / 32) * 4;
  static constexpr int kMaskBytes = 2 * kVisibilityBytes + kBlockM * kBlockN;
  static_assert(!kSmall_ || kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
  static_assert(!kSmall_ || kSharedBytes + 2 * kVisibilityBytes <= kSmallestSharedBytes, "with masks as well");
};

/// What the host makes of a call. Kernels find it in constant memory, where a look costs nothing: a step has too little
/// time to ask shared memory for each option.
struct ForwardSchedule {
  int heads, groups;  // heads of q whose blocks run side by side, and how many such groups make up the heads
  // A product becomes a score to base 2 by `scale`. With softcap, or with terms that cannot be added to products
  // because `scale` is no number to divide by or the bias is read element by element, it goes first through
  // `first_scale`.
  float first_scale, scale;
  float cap;       // base 2
  float per_unit;  // of what is added before `scale`: its inverse
  bool caps, scales_first, adds_alibi, reads_bias, drops, masked;
  bool stages_bias, stages_mask;  // through shared memory: there is room for it
  int bias_offset, mask_offset;   // there
};

/// What the options of one head come to.
template <class Element>
struct ForwardOptions {
  ScoreRules<Element> rules;
  Dropout dropout;

  __device__ __forceinline__ ForwardOptions(const AttentionParams& p, const Sequence& sequence)
      : rules(p, sequence), dropout(p, sequence) {}
};

struct NoOptions {
  __device__ __forceinline__ NoOptions(const AttentionParams&, const Sequence&) {}
};

/// A tile's terms that are the same for a whole row, base 2: those of a lane's row 16 m + 8 r, and of ALiBi what a key
/// further along adds.
struct RowTerms {
  float first = 0.0f, slope = 0.0f;

  __device__ __forceinline__ float of(int m, int r) const {
    return fmaf(-slope, static_cast<float>(16 * m + 8 * r), first);
  }
};

/// What a block works on. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct ForwardWork {
  using Element = typename Config::Element;
  Sequence sequence;
  RowSource<Element, Config::kReads> keys, values;
  std::conditional_t<Config::kOptions, ForwardOptions<Element>, NoOptions> options;
  int first_query;
  TileSpan tiles;
  bool careful = false;         // again, with the running maximum, and without Inf and NaN in V
  bool met_non_finite = false;  // in a tile that is not visible to all

  __device__ __forceinline__ ForwardWork(const ForwardParams& p, int batch, int head, int first_query)
      : sequence(p, batch, head),
        keys(key_rows<Element, Config::kReads>(p, p.k, sequence)),
        values(key_rows<Element, Config::kReads>(p, p.v, sequence)),
        options(p, sequence),
        first_query(first_query) {
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
