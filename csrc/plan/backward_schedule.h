// How CTAs of the backward on CUDA take up tiles of keys, and when they share one: by what a CTA and its steps cost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace flash_ext::plan {

struct BackwardSchedulePlan {
  KeyTileSchedule schedule;
  std::string reason;  // where asked for
};

/// For a problem that csrc/kernels/`kernel` serves, on CUDA and not empty.
BackwardSchedulePlan plan_backward_schedule(const Problem& problem, const std::string& kernel, bool explain);

/// What a CTA, or a cluster of them, goes over: tiles [begin, end) of queries of some heads.
struct BackwardCta {
  int64_t batch, first_head, heads, key_tile, begin, end;
  double cycles;  // as planned
};

/// Those of a dense problem, in the order in which SMs, or clusters, take them up.
std::vector<BackwardCta> backward_ctas(const Problem& problem, const std::string& kernel,
                                       const KeyTileSchedule& schedule);

}  // namespace flash_ext::plan
