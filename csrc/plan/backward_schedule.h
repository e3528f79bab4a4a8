// The schedule of the backward on CUDA: the order in which CTAs take key tiles, and which tiles are split, by a model
// of what a CTA and its steps cost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace flash_ext::plan {

/// The tiles of a kernel, and the cost of a CTA (or of the CTAs of a cluster together) in cycles of an H200 at full
/// load.
struct BackwardTiles {
  int64_t block_m, block_n, head_dim;
  double step;                        // cycles of a step: a query tile of a head
  double cta;                         // cycles of a CTA in addition to its steps
  int64_t cluster = 1;                // CTAs of a cluster
  bool turns_from_last_keys = false;  // deterministic additions to dQ begin with the last keys
  bool splits = true;                 // a key tile may be split

  /// Whether the order begins with the last key tiles of all heads, without sections.
  bool last_keys_first(const Problem& problem) const { return problem.deterministic && turns_from_last_keys; }

  double slot_bytes() const { return static_cast<double>(2 * block_n * head_dim * 4); }
  double cta_of_split() const;
};

struct BackwardSchedulePlan {
  KeyTileSchedule schedule;
  std::string reason;  // if asked for
};

/// The schedule of a non-empty problem on CUDA with the tiles of the kernel that serves it.
BackwardSchedulePlan plan_backward_schedule(const Problem& problem, const BackwardTiles& tiles, bool explain);

/// What a CTA (or a cluster) computes: query tiles [begin, end) of some heads for a key tile. The persistent kernel
/// counts its query tiles from the first query that sees the key tile, so it may have one tile fewer.
struct BackwardCta {
  int64_t batch, first_head, heads, key_tile, begin, end;
  double cycles;  // as the plan estimates
};

/// The CTAs of a dense problem, in the order in which they start. For tests that simulate a schedule.
std::vector<BackwardCta> backward_ctas(const Problem& problem, const BackwardTiles& tiles,
                                       const KeyTileSchedule& schedule);

}  // namespace flash_ext::plan
