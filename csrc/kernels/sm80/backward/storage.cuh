// The data of a CTA's work tile, and its barriers.
#pragma once

#include "config.cuh"
#include "kernels/common/backward/options.cuh"
#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"

namespace flash_ext::sm80 {

/// Named barriers, each of half the warps of a CTA. 0 is __syncthreads().
enum BackwardBarrier : int {
  kProbabilityWarps = 1,  // of S, P and dV
  kGradientWarps = 2,     // of dP, dS and dK
};

/// A tile of queries of a head, counted from the first of the group.
struct BackwardStep {
  int head, tile;
};

/// What is known of a step beforehand: whether it is there, and which of its pairs may be hidden.
enum StepVisibility : int {
  kStepPast = 1,        // no step is left
  kStepPartial = 2,     // window or lengths hide some pair
  kStepMasked = 4,      // masks hide some pair
  kStepMayHide = 8,     // masks or bias may hide some pair
  kStepNonFinite = 16,  // masks or bias may hide pairs, and some row holds Inf or NaN
  kStepHidden = 32,     // masks hide all
};

struct PreparedStep {
  BackwardStep step;
  int flags;
  float slope;  // of ALiBi
};

/// The work tile of a CTA. It lies in shared memory: the main loop needs every register for tiles, and these numbers
/// seldom.
template <class Config>
struct BackwardWorkTile {
  using Element = typename Config::Element;
  Sequence sequence;  // its head is the first of the `heads` below
  RowSource<const Element, false> queries, grad_out;
  int key_tile, first_key;
  int heads;               // of the group
  TileSpan tiles;          // of queries
  int first_tile;          // of the walk: CTAs of a head begin at different ones, lest they add to the same dQ at once
  int64_t workspace_tile;  // in the workspace, of the first head
  float scale;             // of scores
  std::conditional_t<Config::kHasOptions, BackwardOptions, NoBackwardOptions> options;
  PreparedStep ring[Config::kHasOptions ? 8 : 1];  // of the steps n - 2 to n + 2, where number n is made or used
  float* sums;                                     // where a split stores dK, then dV; null: they are complete
  bool large = false;                              // some row has a LargeLse; then no tile is full

  __device__ __forceinline__ BackwardWorkTile(const BackwardParams& p, const BackwardWorkspace& workspace,
                                              const BackwardSchedule& schedule,
                                              const BackwardTask<Config::kBlockM, Config::kBlockN>& task)
      : sequence(task.sequence),
        queries(query_rows<const Element>(p.q, sequence)),
        grad_out(query_rows<const Element>(p.grad_out, sequence)),
        key_tile(task.first_key / Config::kBlockN),
        first_key(task.first_key),
        heads(task.heads),
        tiles(task.tiles),
        workspace_tile(workspace.tile_index(p, sequence.batch, sequence.head, sequence.q_begin, 0, Config::kBlockM)),
        scale(score_scale(p, ScoreUnit<Element>::kPerNatural)),
        options(p, sequence, ScoreUnit<Element>::kPerNatural),
        sums(task.sums(schedule)) {
    static_assert(sizeof(BackwardWorkTile) <= Config::kWorkTileBytes, "the shared-memory plan has room for it");
    // Keys past the end are hidden from all queries.
    if (first_key + Config::kBlockN > sequence.seqlen_k) tiles.full_begin = tiles.full_end = tiles.end;
    const int count = tiles.end - tiles.begin;
    first_tile = tiles.begin + (count > 0 && !workspace.turns ? key_tile % count : 0);
  }

  /// Makes all tiles partial, so that their weights are bounded.
  __device__ __forceinline__ void take_large_lse() {
    large = true;
    tiles.full_begin = tiles.full_end = tiles.end;
  }

  /// The first step, of a query tile that sees some key; past the group if there is none.
  __device__ __forceinline__ BackwardStep first_step() const {
    return {tiles.begin < tiles.end ? 0 : heads, first_tile};
  }

  /// How many CTAs add to a tile of dQ before this one.
  __device__ __forceinline__ int turn(int tile) const {
    const int first = tile * Config::kBlockM;
    const int end = min(first + Config::kBlockM, sequence.seqlen_q);
    return sequence.template key_tiles<Config::kBlockN>(first, end).end - 1 - key_tile;
  }
};

}  // namespace flash_ext::sm80
