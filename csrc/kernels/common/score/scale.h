// What kernels may do with a call's scale, which they have in float. The plan asks it too.
#pragma once

namespace flash_ext {

/// Whether it is above 0. A scale of 0 would make NaN of a hidden score, which is -inf.
constexpr bool is_positive_scale(double scale) { return static_cast<float>(scale) > 0.0f; }

/// Whether it is also so far from the ends of float that a bias can be divided by it.
constexpr bool is_normal_scale(double scale) {
  return static_cast<float>(scale) > 0x1p-60f && static_cast<float>(scale) < 0x1p60f;
}

}  // namespace flash_ext
