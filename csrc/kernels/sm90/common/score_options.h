// Which calls have options that change scores, for the plan too.
#pragma once

#include "kernels/common/score/scale.h"

namespace flash_ext::sm90 {

/// Whether scores are more than products scaled by a positive number. Such calls have kernels of their own, in one
/// shape.
constexpr bool has_score_options(double softcap, bool alibi, double softmax_scale) {
  return softcap > 0.0 || alibi || !is_positive_scale(softmax_scale);
}

}  // namespace flash_ext::sm90
