// Turns scores x into weights 2^(x - stabiliser) in the same registers, and sums this thread's share of the rows.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "softcap.h"

namespace flash_ext::sm90 {

/// Numbers that the host computes from a call's scale and softcap. Kernels read them from constant memory.
struct ScoreTerms : ScoreFactors {
  SoftcapPolynomial softcap;
  SoftcapSmallScores small_scores;

  explicit ScoreTerms(const AttentionParams& p)
      : ScoreFactors(p, kLog2E),
        softcap(p.softcap > 0.0 ? SoftcapPolynomial(p.softmax_scale / p.softcap, p.softcap * kLog2E)
                                : SoftcapPolynomial()),
        small_scores(p.softcap > 0.0 ? SoftcapSmallScores(p.softmax_scale / p.softcap, p.softcap * kLog2E)
                                     : SoftcapSmallScores()) {}
};

/// Takes the place of LargestWeights where the largest weights of rows are not needed.
struct NoLargestWeights {
  __device__ __forceinline__ void zero() {}
  __device__ __forceinline__ void rescale(int, float) {}
  __device__ __forceinline__ void add(int, float, float) {}
};

/// The largest weight of each of a lane's two rows. Weights are not negative, so their bits have the order of integers,
/// and one instruction finds the largest of three integers. NaN is the largest of all.
struct LargestWeights {
  float of_row[2];

  __device__ __forceinline__ void zero() { of_row[0] = of_row[1] = 0.0f; }
  /// Rescales the largest weight of a row, when its stabiliser changes.
  __device__ __forceinline__ void rescale(int r, float factor) { of_row[r] *= factor; }
  __device__ __forceinline__ void add(int r, float x, float y) {
    of_row[r] = __int_as_float(__vimax3_s32(__float_as_int(of_row[r]), __float_as_int(x), __float_as_int(y)));
  }
};

/// Turns base-2 scores divided by `scale` into weights, and sums them. With kExpectsStabilisers, a row without a
/// stabiliser, whose scores were -inf until now, gets a sum that find_failures() notices. kRounds: the scaled score is
/// rounded, as the stabiliser was. Otherwise see FixedStabiliser.
template <bool kExpectsStabilisers, bool kRounds = false, int kN, class Largest>
__device__ __forceinline__ void exponentiate(float (&s)[1][kN][4], float scale, const float (&stabiliser)[2],
                                             float (&sum)[2], Largest& largest) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = !kExpectsStabilisers && stabiliser[r] == -INFINITY ? 0.0f : stabiliser[r];
    sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float score = s[0][n][2 * r + c];
        const float x = ptx::exp2_approx(kRounds ? __fmul_rn(score, scale) - shift : fmaf(score, scale, -shift));
        s[0][n][2 * r + c] = x;
        sum[r] += x;
      }
      largest.add(r, s[0][n][2 * r], s[0][n][2 * r + 1]);
    }
  }
}
template <bool kExpectsStabilisers, bool kRounds = false, int kN>
__device__ __forceinline__ void exponentiate(float (&s)[1][kN][4], float scale, const float (&stabiliser)[2],
                                             float (&sum)[2]) {
  NoLargestWeights none;
  exponentiate<kExpectsStabilisers, kRounds>(s, scale, stabiliser, sum, none);
}

/// Turns products into weights, and sums them. added(n, e) is added to each scaled product: the other terms of its
/// score, in base 2, minus the stabiliser.
template <int kN, class F>
__device__ __forceinline__ void exponentiate_with(float (&s)[1][kN][4], float scale, float (&sum)[2], F added) {
  sum[0] = sum[1] = 0.0f;
  for_each_score(s, [&](float& x, int, int n, int e) {
    x = ptx::exp2_approx(fmaf(x, scale, added(n, e)));
    sum[e / 2] += x;
  });
}

/// Turns products into base-2 scores without the terms that are added. kPolynomial: softcap by a polynomial where that
/// serves the scores. Scores of hidden pairs must not decide it, so it is tested only where all scores are `visible`.
template <bool kPolynomial, class Element, int kN>
__device__ __forceinline__ void scale_and_cap(float (&s)[1][kN][4], const ScoreRules<Element>& rules,
                                              const SoftcapPolynomial& softcap, bool visible) {
  if (kPolynomial && rules.cap > 0.0f && visible && softcap.serves(s)) {
    for_each_score(s, [&](float& x, int, int, int) {
      float u;
      x = softcap.factor(x, u) * u;
    });
  } else {
    rules.scale_and_cap(s);
  }
}

/// ALiBi on one side of the diagonal.
struct AlibiLine {
  float slope;   // along the keys, base 2
  int distance;  // of the key in column 0 of row 0 of a lane's accumulators from that row's diagonal
};

/// How a score is capped.
enum class Cap { kNone, kPolynomial, kTanh };

/// Turns products into weights, with softcap and ALiBi, and sums them.
template <Cap kCap, bool kAlibi, class Element, int kN>
__device__ __forceinline__ void exponentiate_by_rules(float (&s)[1][kN][4], const ScoreRules<Element>& rules,
                                                      const SoftcapPolynomial& softcap, const AlibiLine& line,
                                                      const float (&stabiliser)[2], float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float first =
        kAlibi ? fmaf(line.slope, static_cast<float>(line.distance - 8 * r), -stabiliser[r]) : -stabiliser[r];
    sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float added = kAlibi ? fmaf(line.slope, static_cast<float>(8 * n + c), first) : first;
        float x = s[0][n][2 * r + c];
        if constexpr (kCap == Cap::kPolynomial) {
          float u;
          const float factor = softcap.factor(x, u);
          x = fmaf(factor, u, added);
        } else if constexpr (kCap == Cap::kTanh) {
          x = fmaf(softcap_tanh<Element>(x * rules.scale), rules.cap, added);
        } else {
          x = fmaf(x, rules.scale, added);
        }
        x = ptx::exp2_approx(x);
        s[0][n][2 * r + c] = x;
        sum[r] += x;
      }
  }
}

/// Turns products into weights, with softcap and ALiBi, and sums them. All keys stand on one side of the diagonal,
/// where ALiBi is a straight line.
template <bool kPolynomial, class Element, int kN>
__device__ __forceinline__ void exponentiate_beside_diagonal(float (&s)[1][kN][4], const ScoreRules<Element>& rules,
                                                             const SoftcapPolynomial& softcap, const AlibiLine& line,
                                                             const float (&stabiliser)[2], float (&sum)[2]) {
  if (rules.cap == 0.0f) {
    exponentiate_by_rules<Cap::kNone, true>(s, rules, softcap, line, stabiliser, sum);
  } else if (!kPolynomial || !softcap.serves(s)) {
    exponentiate_by_rules<Cap::kTanh, true>(s, rules, softcap, line, stabiliser, sum);
  } else if (line.slope != 0.0f) {
    exponentiate_by_rules<Cap::kPolynomial, true>(s, rules, softcap, line, stabiliser, sum);
  } else {
    exponentiate_by_rules<Cap::kPolynomial, false>(s, rules, softcap, line, stabiliser, sum);
  }
}

/// Turns products into weights, with softcap alone, and sums them. Returns whether all products of this thread are in
/// the range of SoftcapSmallScores; otherwise weights and sums are of no use.
template <int kN>
__device__ __forceinline__ bool exponentiate_small_scores(float (&s)[1][kN][4], const SoftcapSmallScores& softcap,
                                                          const float (&stabiliser)[2], float (&sum)[2]) {
  int signs = -1;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float w[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[0][n][2 * r + c];
        const float factor = softcap.factor(x, w[c]);
        x = ptx::exp2_approx(fmaf(factor, x, -stabiliser[r]));
        sum[r] += x;
      }
      signs &= __float_as_int(w[0]) & __float_as_int(w[1]);
    }
  }
  // The test of the sums keeps the exponentials where products run: ptxas would move them after the vote's wait.
  return signs < 0 && sum[0] + sum[1] >= 0.0f;
}

}  // namespace flash_ext::sm90
