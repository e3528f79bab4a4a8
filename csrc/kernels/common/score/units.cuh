// The unit of scores, base 2 or natural, and what large scores require: bounds of weights, stabilisers and biases.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/ptx/arithmetic.h"

namespace flash_ext {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// Bounds a finite bias to [-most, most], so that no score overflows. Beyond `most` a bias exceeds every product, so
/// two such keys count as equal. Inf and NaN stay.
__device__ __forceinline__ float saturate_bias(float bias, float most) {
  return fabsf(bias) < INFINITY ? fminf(fmaxf(bias, -most), most) : bias;
}

/// `most` for a bias that is multiplied by `factor`, or by log2(e).
inline float most_bias(float factor) {
  const float size = factor < 0.0f ? -factor : factor;
  return 0x1p126f / (size > kLog2E ? size : kLog2E);
}

/// lse in base 2 of rows with scores so large that rounding alone may make a weight Inf when the backward subtracts
/// lse. For these rows it subtracts slack() less than lse, so that no weight is lost, and bounds weights by 1. A score
/// within rounding of the largest one then counts as equal to it.
struct LargeLse {
  static constexpr float kLowest = -0x1p20f, kHighest = 0x1p16f, kSlack = 0x1p-20f;

  /// Whether a finite lse is that large; false for Inf and NaN.
  __device__ __forceinline__ static bool is(float lse) {
    return (lse > kHighest && lse < INFINITY) || (lse < kLowest && lse > -INFINITY);
  }
  __device__ __forceinline__ static float slack(float lse) { return is(lse) ? (fabsf(lse) - kHighest) * kSlack : 0.0f; }
  __device__ __forceinline__ static float bound(float weight) { return ptx::min_or_nan(weight, 1.0f); }
};

/// The unit of 16-bit inputs and of TF32: x = s * log2(e), so that a weight 2^(x - r) costs one FMA and one
/// exponential. It suits scores of moderate size (FixedStabiliser). The safe path rounds scores before it takes a
/// maximum, so that the largest one minus the maximum is exactly 0.
struct BaseTwoUnit {
  static constexpr bool kNatural = false;
  static constexpr float kPerNatural = kLog2E, kNaturalPer = kLn2;

  /// The exponential of a difference of scores.
  __device__ __forceinline__ static float exp(float x) { return ptx::exp2_approx(x); }
  __device__ __forceinline__ static float log(float x) { return log2f(x); }
  __device__ __forceinline__ static float multiply(float x, float y) { return __fmul_rn(x, y); }
  __device__ __forceinline__ static float of_bias(float bias) {
    return saturate_bias(bias, 0x1p126f / kLog2E) * kLog2E;
  }
  /// The weight of product * scale in a row of this lse.
  __device__ __forceinline__ static float weight(float product, float scale, float lse) {
    return ptx::exp2_approx(fmaf(product, scale, -lse));
  }
  /// The lse, in natural units, that weight_of_score() takes.
  __device__ __forceinline__ static float lse_with_slack(float natural_lse) {
    return natural_lse - LargeLse::slack(natural_lse * kLog2E) * kLn2;
  }
  /// The weight of a score. The FMA rounds once; rounding lse * log2(e) first would shift a whole row.
  __device__ __forceinline__ static float weight_of_score(float score, float natural_lse) {
    return LargeLse::bound(ptx::exp2_approx(fmaf(natural_lse, -kLog2E, score)));
  }
};

/// The unit of float32 inputs: that of lse. Multiplied by log2(e), a score of 1e4 and its lse would be rounded once
/// more, by 1e-3 each, and a bias near the largest float would overflow. A score is rounded before lse is subtracted,
/// so that forward and backward see the same score; therefore multiply() must not be fused into an FMA.
struct NaturalUnit {
  static constexpr bool kNatural = true;
  static constexpr float kPerNatural = 1.0f, kNaturalPer = 1.0f;

  /// The exponential of x * scale, a difference of scores.
  __device__ __forceinline__ static float exp(float x, float scale = 1.0f) {
    return ptx::exp2_approx(x * (scale * kLog2E));
  }
  __device__ __forceinline__ static float log(float x) { return logf(x); }
  __device__ __forceinline__ static float multiply(float x, float y) { return __fmul_rn(x, y); }
  __device__ __forceinline__ static float of_bias(float bias) { return bias; }
  __device__ __forceinline__ static float weight(float product, float scale, float lse) {
    return exp(multiply(product, scale) - lse);
  }
  __device__ __forceinline__ static float lse_with_slack(float lse) { return lse; }
  __device__ __forceinline__ static float weight_of_score(float score, float lse) { return exp(score - lse); }
};

/// A score plus a bias, which of_bias() converts to the unit of scores. A bias of -inf hides even a score of NaN.
template <class OfBias>
__device__ __forceinline__ float with_bias(float score, float bias, OfBias of_bias) {
  return bias == -INFINITY ? -INFINITY : score + of_bias(bias);
}

/// The weight of a score in a row with `lse` from lse_with_slack(), or -inf if the row does not exist or sees nothing.
/// Hidden scores are tested first, because an lse of NaN must not reach them.
template <class Unit>
__device__ __forceinline__ float visible_weight(float score, float lse) {
  return lse == -INFINITY || score == -INFINITY ? 0.0f : Unit::weight_of_score(score, lse);
}

/// The range of stabilisers (base 2) for which a row max may stay fixed. A stabiliser is a rounded score, and an FMA
/// subtracts it from an exact one; the difference is a factor of all weights of the row. Within this range it does not
/// show: the weight of the largest score rounds to 1 as an Element. Beyond it a row takes the safe path, whose scores
/// are rounded. Towards kLowest, where only rows of padding lie, the factor may reach a percent.
template <class Element>
struct FixedStabiliser {
  static constexpr float kLowest = -0x1p17f, kHighest = std::is_same_v<Element, __half> ? 0x1p13f : 0x1p16f;

  /// True for -inf, too: the row saw no key.
  __device__ __forceinline__ static bool serves(float stabiliser) {
    return stabiliser <= kHighest && (stabiliser >= kLowest || stabiliser == -INFINITY);
  }
};

template <class Element>
using ScoreUnit = std::conditional_t<std::is_same_v<Element, float>, NaturalUnit, BaseTwoUnit>;

}  // namespace flash_ext
