// Which scales kernels may take for positive, for the plan too.
#pragma once

namespace flash_ext {

/// Whether a scale is above 0 in float, as kernels have it. A scale of 0 would make NaN of a hidden score, which is
/// -inf.
constexpr bool is_positive_scale(double softmax_scale) { return static_cast<float>(softmax_scale) > 0.0f; }

}  // namespace flash_ext
