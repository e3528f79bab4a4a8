// Softcap by products and additions: cap * tanh(s * scale), without the MUFU unit, which the exponentials need.
#pragma once

#include <cmath>

namespace flash_ext::sm90 {

/// A polynomial, which the host computes from softcap and scale. Kernels read it from constant memory, from which FMA
/// takes operands.
///
/// tanh(x) = x P(x^2) for |x| <= 1/2, P of degree 2 and of least relative error, 2.3e-5. With h = x^2 + shift, P is
/// lead * (h^2 + end): two FMAs. With u = t x and t^5 = lead * cap, the factor disappears: with u for x, shift t^2 for
/// shift and end t^4 for end, u (h^2 + end) is cap * tanh(x).
struct SoftcapPolynomial {
  float largest = -1.0f;  // the largest |s| that the polynomial serves
  float to_u = 0.0f;      // from s
  float shift = 0.0f, end = 0.0f;

  SoftcapPolynomial() = default;

  /// `scale` turns a product into the argument of tanh. If scale or cap lies at the ends of the range of a float, the
  /// polynomial serves no scores.
  SoftcapPolynomial(double scale, double cap) {
    constexpr double kShift = -1.4395112641829453, kEnd = 6.607431323231963, kLead = 0.11520976431166852;
    constexpr double kLeast = 0x1p-100, kMost = 0x1p100;
    const double size = std::fabs(scale);
    if (!(cap > kLeast && cap < kMost && size > kLeast && size < kMost)) return;
    const double t = std::pow(kLead * cap, 1.0 / 5.0);
    largest = static_cast<float>(0.5 / size);
    to_u = static_cast<float>(t * scale);
    shift = static_cast<float>(t * t * kShift);
    end = static_cast<float>(std::pow(t, 4) * kEnd);
  }

#ifdef __CUDACC__
  /// Whether the polynomial serves all of a warp's scores. A NaN stays NaN either way.
  template <int kN>
  __device__ __forceinline__ bool serves(const float (&s)[1][kN][4]) const {
    float most[4] = {};
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(s[0][n][e]));
    return __all_sync(~0u, fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])) <= largest);
  }

  /// Sets u, and returns the factor that turns u into the capped score.
  __device__ __forceinline__ float factor(float s, float& u) const {
    u = s * to_u;
    const float h = fmaf(u, u, shift);
    return fmaf(h, h, end);
  }
#endif
};

/// A polynomial for |x| <= 1/5: tanh(x) = x P(x^2), P of degree 1 and of least relative error, 2.6e-5. With
/// w = s^2 + shift, which is below 0 in that range alone, s (constant + linear w) is cap * tanh(s * scale). A score
/// takes three instructions, and one more checks the signs of w of two scores.
struct SoftcapSmallScores {
  static constexpr double kRange = 0.2;  // of x

  float shift = 0.0f;  // minus the square of the largest product; 0: it serves none
  float constant = 0.0f, linear = 0.0f;

  SoftcapSmallScores() = default;

  /// `scale` turns a product into the argument of tanh. If powers of scale and cap leave the range of a float, the
  /// polynomial serves no scores.
  SoftcapSmallScores(double scale, double cap) {
    constexpr double kEnd = kRange * kRange, kConstant = 0.9999738, kLinear = -0.32807637;  // of x^2, and of P
    constexpr double kLeast = 0x1p-100, kMost = 0x1p100;
    const auto has_room = [](double x) { return x > kLeast && x < kMost; };
    const double square = scale * scale, slope = cap * std::fabs(scale);
    if (!has_room(square) || !has_room(slope) || !has_room(slope * square)) return;
    shift = static_cast<float>(-kEnd / square);
    constant = static_cast<float>(cap * scale * (kConstant + kEnd * kLinear));
    linear = static_cast<float>(cap * scale * square * kLinear);
  }

#ifdef __CUDACC__
  /// Sets w, and returns the factor that turns s into the capped score.
  __device__ __forceinline__ float factor(float s, float& w) const {
    w = fmaf(s, s, shift);
    return fmaf(w, linear, constant);
  }
#endif
};

}  // namespace flash_ext::sm90
