// Which calls have options that change scores, for the plan too.
#pragma once

namespace flash_ext::sm90 {

/// Scores that are more than products scaled by a positive number: kernels of their own, in one shape.
constexpr bool has_score_options(double softcap, bool alibi, double softmax_scale) {
  return softcap > 0.0 || alibi || static_cast<float>(softmax_scale) <= 0.0f;
}

}  // namespace flash_ext::sm90
