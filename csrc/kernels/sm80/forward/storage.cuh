// Tiles and shared memory of the forward, and what a CTA of it works on.
#pragma once

#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/tile.cuh"
#include "kernels/sm80/common/config.h"
#include "shape.h"
#include "visibility.h"

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
  static constexpr int kBlocksPerSm = kWide && !kSmall_ ? 1 : 2;
  static constexpr bool kQueryInRegisters = kHeadDim == 64 && !kFloat;
  // Where addresses must be computed again in every step, of the copies or of all that a lane reads.
  static constexpr bool kFullPrecision = std::is_same_v<Element, float>;
  static constexpr bool kRematerialisesThread =
      (kHeadDim == 128 && kVariant != ForwardVariant::kPlain && !kReads && !kOneBias) || (kWide && kFullPrecision);
  static constexpr bool kRematerialisesLane =
      (kWide && kFullPrecision && kVariant == ForwardVariant::kPlain) || (kHeadDim == 128 && (kOneMask || kOneDropout));
  static constexpr bool kLooksEarly = kHeadDim == 64;  // at what a mask leaves: in registers while a step begins
  // With three TF32 products for one, the unrolled code of a tile is longer than the instruction cache.
  static constexpr int kUnroll = std::is_same_v<Element, float> ? 1 : 16;
  static constexpr bool kFenced = (kUnroll == 1 && kWide) || (kHeadDim == 128 && kComputes);
  static constexpr bool kRunningMaximum = kFloat && (kOptionBranches || kWide);
  // P must stay finite as an Element, l and out in float.
  static constexpr float kSumLimit = std::is_same_v<Element, __half> ? 0x1p14f : 0x1p60f;
  // A smaller sum of a row has lost what it is a sum of.
  static constexpr float kLeastSum = std::is_same_v<Element, __half> ? 0x1p-2f : 0x1p-40f;

  using Layout = TileLayout<Element, kHeadDim>;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kTileBytes = Layout::bytes(kBlockN);
  static constexpr int kTilesBytes = kQueryBytes + 2 * kStages * kTileBytes;
  static constexpr int kWorkTileBytes = kForwardWorkTileBytes;
  static constexpr int kSharedBytes = kTilesBytes + kWorkTileBytes;  // without what options need
  static_assert(kSharedBytes == forward_shared_bytes(kShape, kHeadDim, kFloat), "which the plan goes by");
  static constexpr int kVisibilityBytes = kBlockM * (kBlockN / 32) * 4;  // words of a block mask for a tile
  static constexpr int kRandomBytes = kBlockN / 16 * 16;                 // KeyRandomBits of a tile
  static_assert(!kSmall_ || kSharedBytes <= kSmallestSharedBytes, "every GPU must be able to launch it");
  static_assert(!kSmall_ || kSharedBytes + 2 * kVisibilityBytes <= kSmallestSharedBytes, "with masks as well");
  static_assert(!kOneBias ||
                    kSharedBytes + kBlockM * kBlockN * static_cast<int>(sizeof(BiasElement)) <= kSmallestSharedBytes,
                "with the bias as well");
};

/// What the host makes of a call. Kernels find it in constant memory, where a look costs nothing: a step has too little
/// time to ask shared memory for each option.
struct ForwardSchedule {
  int heads, groups;          // heads of q whose CTAs run side by side, and how many such groups make up the heads
  int batches, batch_groups;  // the same of batch entries
  // A product becomes a score by `scale`. With softcap, or with terms that cannot be added to products because `scale`
  // is no number to divide by, the bias is read element by element, or scores are natural and rounded as those of the
  // backward, it goes first through `first_scale`.
  float first_scale, scale;
  float cap;
  float per_unit;   // of what is added before `scale`: its inverse
  float most_bias;  // of saturate_bias()
  bool caps, scales_first, adds_alibi, reads_bias, drops, masked, blocks_mask;
  bool stages_bias;               // through shared memory: there is room for it
  int bias_offset, words_offset;  // there; words of a block mask
  MaskBits mask;
  WorkList list;  // of packed sequences; then no heads, groups and batches count
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

/// A mask's words of the block's queries.
struct BlockMaskWords {
  const uint32_t* words = nullptr;

  __device__ __forceinline__ void find(const MaskBits& bits, int batch, int head, int first_query) {
    if (bits.words) words = bits.words + bits.unit(batch, head, first_query / kMaskRows, 0) * kMaskRows;
  }
};

struct NoMaskWords {
  __device__ __forceinline__ void find(const MaskBits&, int, int, int) {}
};

/// A tile's terms that are the same for a whole row: those of a lane's row 16 m + 8 r, and of ALiBi what a key
/// further along adds.
struct RowTerms {
  float first = 0.0f, slope = 0.0f;

  __device__ __forceinline__ float of(int m, int r) const {
    return fmaf(-slope, static_cast<float>(16 * m + 8 * r), first);
  }
};

/// What a CTA works on. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct ForwardWorkTile {
  using Element = typename Config::Element;
  Sequence sequence;
  RowSource<Element, Config::kReads> keys, values;
  std::conditional_t<Config::kDropout, ForwardOptions<Element>, NoOptions> options;
  int first_query;
  TileSpan tiles;
  // Again, with V sanitised, and else as before, so that what is hidden leaves no trace in the bits; and if sums
  // overflowed, on the safe path, with the running maximum.
  bool sanitised = false, safe_path = false;
  bool met_non_finite = false;  // in V, when it was sanitised
  std::conditional_t<Config::kMasks, BlockMaskWords, NoMaskWords> mask;

  __device__ __forceinline__ ForwardWorkTile(const ForwardParams& p, int batch, int head, int first_query)
      : sequence(p, batch, head),
        keys(key_rows<Element, Config::kReads>(p, p.k, sequence)),
        values(key_rows<Element, Config::kReads>(p, p.v, sequence)),
        options(p, sequence),
        first_query(first_query) {
    tiles = sequence.key_tiles<Config::kBlockN>(first_query, min(first_query + Config::kBlockM, sequence.seqlen_q));
    static_assert(sizeof(ForwardWorkTile) <= Config::kWorkTileBytes, "the shared-memory plan has room for it");
  }
};

/// A tile that masks may hide in part.
struct MaskedTile {
  int tile;
  bool partly;  // of kReads: hidden, which the bits of the mask or the words of the block mask then say
};

}  // namespace flash_ext::sm80
