// The data of a forward call in constant memory, and of a CTA's work tile in shared memory.
#pragma once

#include "config.h"
#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "mask_bits.h"

namespace flash_ext::sm80 {

/// Named barriers. 0 is __syncthreads().
enum ForwardBarrier : int {
  kAllWarps = 1,  // reached by the warps of the CTA from different lines, which __syncthreads() does not allow
};

/// What the host derives from a call. It lies in constant memory, where reads are free: a step has too little time to
/// read shared memory for each option.
struct ForwardConstants {
  int heads, groups;          // heads of q whose CTAs run side by side, and how many such groups make up the heads
  int batches, batch_groups;  // the same of batch entries
  // A product becomes a score by `scale`. In these cases it first goes through `first_scale`: with softcap; where
  // `scale` is no number to divide by, or the bias is read element by element, so that terms cannot be added to
  // products; where scores are natural and rounded as those of the backward.
  float first_scale, scale;
  float cap;
  float per_unit;   // 1 / scale: factor of what is added before `scale`
  float most_bias;  // of saturate_bias()
  bool caps, scales_first, adds_alibi, reads_bias, drops, masked;
  bool stages_bias;  // through shared memory: there is room for it
  int bias_offset;   // there
  ForwardMasks masks;
  WorkList list;  // of packed sequences; then no heads, groups and batches count
};

/// The options of one head.
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

/// Where the bits of the masks begin for the CTA's queries.
struct MasksOfTile {
  const uint32_t* words = nullptr;  // of the boolean mask
  const int32_t* ids = nullptr;     // of the block mask, of all queries

  __device__ __forceinline__ void find(const ForwardMasks& masks, int batch, int head, int first_query) {
    if (masks.pairs.words)
      words = masks.pairs.words + masks.pairs.unit(batch, head, first_query / kMaskRows, 0) * kMaskRows;
    if (masks.blocks.ids) ids = masks.blocks.ids_of(batch, head);
  }
};

struct NoMasks {
  __device__ __forceinline__ void find(const ForwardMasks&, int, int, int) {}
};

/// The part of ALiBi that is the same for all keys of a tile, for a lane's row 16 m + 8 r. add_alibi() (options.cuh)
/// adds the other part, which depends on the key, to the scores.
struct AlibiOfRows {
  float first = 0.0f, slope = 0.0f;

  __device__ __forceinline__ float of(int m, int r) const {
    return fmaf(-slope, static_cast<float>(16 * m + 8 * r), first);
  }
};

/// The work tile of a CTA. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct ForwardWorkTile {
  using Element = typename Config::Element;
  Sequence sequence;
  RowSource<Element, Config::kReads> keys, values;
  std::conditional_t<Config::kDropout, ForwardOptions<Element>, NoOptions> options;
  int first_query;
  TileSpan tiles;
  // Set for a recomputation. sanitised: V is sanitised and all else as before, so that what is hidden leaves no trace
  // in the bits. safe_path: with the running maximum, because some row was lost.
  bool sanitised = false, safe_path = false;
  bool met_non_finite = false;  // in V, when it was sanitised
  std::conditional_t<Config::kMasks, MasksOfTile, NoMasks> masks;

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

}  // namespace flash_ext::sm80
