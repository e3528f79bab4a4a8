// How CTAs of the backward on CUDA take up tiles of keys, and when they share one: by what a CTA and its steps cost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace flash_ext::plan {

/// Tiles of a kernel, and what a CTA costs, or the CTAs of a cluster together: cycles of an H200 at full load.
struct BackwardTiles {
  int64_t block_m, block_n, head_dim;
  double step;              // a tile of queries of a head
  double cta;               // beside its steps
  int64_t cluster = 1;      // CTAs
  bool in_sections = true;  // of heads, whose tiles of keys stand side by side
  bool splits = true;       // whether a tile of keys may be split

  /// Additions to dQ that take turns do so from the last keys on: without sections these come first.
  bool last_keys_first(const Problem& problem) const { return problem.deterministic && !in_sections; }

  double slot_bytes() const { return static_cast<double>(2 * block_n * head_dim * 4); }
  double cta_of_split() const;
};

struct BackwardSchedulePlan {
  KeyTileSchedule schedule;
  std::string reason;  // where asked for
};

/// For a problem on CUDA that is not empty, and the tiles of the kernel that serves it.
BackwardSchedulePlan plan_backward_schedule(const Problem& problem, const BackwardTiles& tiles, bool explain);

/// What a CTA, or a cluster of them, goes over: tiles [begin, end) of queries of some heads.
struct BackwardCta {
  int64_t batch, first_head, heads, key_tile, begin, end;
  double cycles;  // as planned
};

/// Those of a dense problem, in the order in which SMs, or clusters, take them up.
std::vector<BackwardCta> backward_ctas(const Problem& problem, const BackwardTiles& tiles,
                                       const KeyTileSchedule& schedule);

}  // namespace flash_ext::plan
