// From scores to weights: 2^(x - reference) in their place, and the sums of this thread's share of the rows.
#pragma once

#include "../common/scores.cuh"
#include "../ptx/clamp.h"

namespace flash_ext::sm90 {

/// Of base-2 scores divided by `scale`. With kPlain, a row without a reference, whose scores were -inf until now, gets
/// a sum that must_repeat() notices. kRounds: the scaled score is rounded, as the reference was. Else the rounding of a
/// reference beyond 2^30 or so is an exponent of its own, and overflows.
template <bool kPlain, bool kRounds = false, int kN>
__device__ __forceinline__ void exponentiate(float (&s)[1][kN][4], float scale, const float (&reference)[2],
                                             float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = !kPlain && reference[r] == -INFINITY ? 0.0f : reference[r];
    sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float score = s[0][n][2 * r + c];
        const float x = ptx::exp2_approx(kRounds ? __fmul_rn(score, scale) - shift : fmaf(score, scale, -shift));
        s[0][n][2 * r + c] = x;
        sum[r] += x;
      }
  }
}

/// 2^x to 2^-13 relative, by additions and products.
__device__ __forceinline__ float exp2_by_products(float x) {
  constexpr float kWhole = 0x1.8p23f;  // added, leaves the nearest integer in the low bits
  x = ptx::clamp(x, -127.0f, 128.0f);  // 0 and inf
  const float whole = x + kWhole, rest = x - (whole - kWhole);
  float y = fmaf(0.05517167f, rest, 0.24261113f);  // of least relative error over [-1/2, 1/2]
  y = fmaf(y, rest, 0.69326097f);
  y = fmaf(y, rest, 0.99992806f);
  return y * __uint_as_float((__float_as_uint(whole) << 23) + 0x3F800000u);
}

template <bool kCapped, int kProducts, class Element, int kN>
__device__ __forceinline__ void exponentiate_by_rules(float (&s)[1][kN][4], const ScoreRules<Element>& rules,
                                                      const TileCoordinates<false>& at, const float (&reference)[2],
                                                      float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int distance = at.column(0, 0) - at.row(0, 2 * r) - rules.diagonal;
    const float first = fmaf(rules.slope, static_cast<float>(distance), -reference[r]);
    sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float added = fmaf(rules.slope, static_cast<float>(8 * n + c), first);
        float x = s[0][n][2 * r + c];
        x = kCapped ? fmaf(rules.tanh(x * rules.scale), rules.cap, added) : fmaf(x, rules.scale, added);
        x = kCapped && n % 4 < kProducts ? exp2_by_products(x) : ptx::exp2_approx(x);
        s[0][n][2 * r + c] = x;
        sum[r] += x;
      }
  }
}

/// Of products that softcap and ALiBi go before. All keys stand left of the diagonal, where ALiBi is a straight line.
/// The unit that has exp2 has tanh too: with softcap, kProducts of every four eights of keys leave it alone.
template <int kProducts, class Element, int kN>
__device__ __forceinline__ void exponentiate_left_of_diagonal(float (&s)[1][kN][4], const ScoreRules<Element>& rules,
                                                              const TileCoordinates<false>& at,
                                                              const float (&reference)[2], float (&sum)[2]) {
  rules.cap > 0.0f ? exponentiate_by_rules<true, kProducts>(s, rules, at, reference, sum)
                   : exponentiate_by_rules<false, 0>(s, rules, at, reference, sum);
}

}  // namespace flash_ext::sm90
