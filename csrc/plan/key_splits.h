// How the forward on Hopper splits the keys of query tiles over CTAs where too few tiles would leave SMs idle.
#pragma once

#include <string>

#include "kernels/common/scheduler/key_splits.h"
#include "kernels/sm90/forward/shape.h"
#include "problem.h"

namespace flash_ext::plan {

struct KeySplitsPlan {
  KeySplits splits;
  std::string reason;  // if asked for
};

/// The splits of a non-empty problem that the plain variant of sm90/forward serves with tiles of this shape.
KeySplitsPlan plan_key_splits(const Problem& problem, const sm90::HeadDims& dims, const sm90::ForwardShape& shape,
                              bool explain);

/// Cycles of an H200 that a non-empty problem takes with tiles of this shape and with the splits that save the most.
double forward_cycles(const Problem& problem, const sm90::HeadDims& dims, const sm90::ForwardShape& shape);

}  // namespace flash_ext::plan
