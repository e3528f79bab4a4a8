// What scores are counted in, and what their size asks for: weights of large scores, stabilisers, biases.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/ptx/arithmetic.h"

namespace flash_ext {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// A bias that no score overflows by: beyond `most` its size is all that is left of a score, and what is as large is a
/// tie. Inf and NaN stay.
__device__ __forceinline__ float saturate_bias(float bias, float most) {
  return fabsf(bias) < INFINITY ? fminf(fmaxf(bias, -most), most) : bias;
}

/// `most` of a bias that this factor makes a score, or a product, and log2(e) a score.
inline float most_bias(float factor) {
  const float size = factor < 0.0f ? -factor : factor;
  return 0x1p126f / (size > kLog2E ? size : kLog2E);
}

/// lse, to base 2, of rows whose scores are so large that rounding alone may make a weight Inf where the backward takes
/// lse off. There less is taken off, so that no weight is lost, and weights are bounded by 1: a score as near to the
/// largest one as its last places counts as it.
struct LargeLse {
  static constexpr float kLowest = -0x1p20f, kHighest = 0x1p16f, kSlack = 0x1p-20f;

  /// Not of Inf or NaN.
  __device__ __forceinline__ static bool is(float lse) {
    return (lse > kHighest && lse < INFINITY) || (lse < kLowest && lse > -INFINITY);
  }
  __device__ __forceinline__ static float slack(float lse) { return is(lse) ? (fabsf(lse) - kHighest) * kSlack : 0.0f; }
  __device__ __forceinline__ static float bound(float weight) { return ptx::min_or_nan(weight, 1.0f); }
};

/// What scores of 16-bit inputs and of TF32 are counted in: x = s * log2(e), so that a weight 2^(x - r) takes one FMA
/// and one exponential. That is for scores of moderate size (FixedStabiliser): where a maximum is taken of scores they
/// are rounded first, so that the largest one less the maximum is 0.
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
  /// The weight of a score. One rounding: that of lse * log2(e) alone would shift a whole row.
  __device__ __forceinline__ static float weight_of_score(float score, float natural_lse) {
    return LargeLse::bound(ptx::exp2_approx(fmaf(natural_lse, -kLog2E, score)));
  }
};

/// What scores of floats are counted in: as lse is. Times log2(e), a score of 1e4 and its lse would be rounded once
/// more, by 1e-3 each, and a bias near the largest float would overflow. A score is rounded before lse is taken off, so
/// that forward and backward have the same: no FMA may take the product in.
struct NaturalUnit {
  static constexpr bool kNatural = true;
  static constexpr float kPerNatural = 1.0f, kNaturalPer = 1.0f;

  /// Of a difference that `scale` makes one of scores.
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

/// A score and a bias, which of_bias() counts as scores are; a bias of -inf hides even a score of NaN.
template <class OfBias>
__device__ __forceinline__ float with_bias(float score, float bias, OfBias of_bias) {
  return bias == -INFINITY ? -INFINITY : score + of_bias(bias);
}

/// The weight of a score, in a row whose lse is what lse_with_slack() made of it, or -inf: it is not there, or sees
/// nothing. Hidden scores first: an lse of NaN must not reach them.
template <class Unit>
__device__ __forceinline__ float visible_weight(float score, float lse) {
  return lse == -INFINITY || score == -INFINITY ? 0.0f : Unit::weight_of_score(score, lse);
}

/// A stabiliser is a rounded score. An FMA takes it off an exact one; the difference is a factor of the row's weights,
/// which must not show: in this range (base 2) the weight of the largest score is 1 as an Element, and out that key's
/// value, bit for bit. Beyond it a row takes the safe path, whose scores are rounded. Below, where nothing but rows of
/// padding lie, a percent may show.
template <class Element>
struct FixedStabiliser {
  static constexpr float kLowest = -0x1p17f, kHighest = std::is_same_v<Element, __half> ? 0x1p13f : 0x1p16f;

  /// -inf is: the row saw no key.
  __device__ __forceinline__ static bool serves(float stabiliser) {
    return stabiliser <= kHighest && (stabiliser >= kLowest || stabiliser == -INFINITY);
  }
};

template <class Element>
using ScoreUnit = std::conditional_t<std::is_same_v<Element, float>, NaturalUnit, BaseTwoUnit>;

}  // namespace flash_ext
