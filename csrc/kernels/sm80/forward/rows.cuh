// The state of a warp's rows in the forward: out, row stabilisers and row sums.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardRows {
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kN = Config::kBlockN / 8;
  static constexpr int kD = Config::kHeadDim / 8;
  using Unit = ScoreUnit<typename Config::Element>;
  using Scores = float[kM][kN][4];

  float out[kM][kD][4];
  float stabiliser[kM][2];  // a score to base 2, or, of floats, a product; -inf while the row has seen no key
  float sum[kM][2];

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        stabiliser[m][r] = -INFINITY;
        sum[m][r] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][d][e] = 0.0f;
    }
  }

  /// Raises the stabiliser of each row to the maximum of the tile plus lift(m, r), and rescales the row's sum and out.
  template <class Lift>
  __device__ __forceinline__ void update_row_max(const Scores& s, float scale, const AlibiOfRows& terms, Lift lift,
                                                 bool first) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = -INFINITY;
#pragma unroll
        for (int n = 0; n < kN; ++n) largest = fmaxf(largest, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
        if constexpr (!Unit::kNatural) largest = fmaf(largest, scale, terms.of(m, r));
        largest = max_of_row(largest);
        const float updated = fmaxf(stabiliser[m][r], largest + lift(m, r));
        const float factor = updated == -INFINITY ? 1.0f : shrink(stabiliser[m][r] - updated, scale);
        stabiliser[m][r] = updated;
        if (Config::kRunningMaximum || !first) multiply(m, r, factor);
      }
  }

  /// Whether some row that exists, 16 m + 8 r below rows_left, has no stabiliser.
  __device__ __forceinline__ bool some_without_stabiliser(int rows_left) const {
    bool missing = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) missing |= stabiliser[m][r] == -INFINITY && 16 * m + 8 * r < rows_left;
    return __any_sync(~0u, missing);
  }

  /// Turns S into P in place. `hide` zeroes hidden weights that turned out to be NaN. kRounds: scores are rounded as
  /// the stabiliser was. Else see FixedStabiliser.
  template <bool kRounds, class Hide>
  __device__ __forceinline__ void exponentiate(Scores& s, float scale, const AlibiOfRows& terms, Hide hide) {
    float of_tile[kM][2], total = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = stabiliser[m][r] == -INFINITY ? 0.0f : stabiliser[m][r], term = terms.of(m, r);
        of_tile[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float score = s[m][n][2 * r + c];
            const float x = weight<kRounds>(score, scale, term, base);
            s[m][n][2 * r + c] = x;
            of_tile[m][r] += x;
          }
        total += of_tile[m][r];
      }
    if constexpr (Config::kReads || !Config::kRunningMaximum) {
      if (__any_sync(~0u, !(total <= Config::kSumLimit))) {
        if (hide(s)) add_up(s, of_tile);
        if constexpr (!Config::kRunningMaximum) lower(s, of_tile, scale);
      }
    }
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[m][r] += of_tile[m][r];
  }

  /// Whether rows that exist must be recomputed: a sum overflowed, or vanished because its stabiliser was too high, or
  /// the stabiliser is too large. `biased`: a row that has seen no key may have a key whose bias became -inf only in
  /// units of scores.
  __device__ __forceinline__ bool lost(int rows_left, bool biased) const {
    bool any = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        bool bad = !(sum[m][r] < INFINITY);
        if constexpr (Config::kOptionBranches) bad |= row_sum(m, r) < Config::kLeastSum && stabiliser[m][r] > -INFINITY;
        if constexpr (!Unit::kNatural) {
          bad |= !FixedStabiliser<typename Config::Element>::serves(stabiliser[m][r]);
          bad |= biased && stabiliser[m][r] == -INFINITY;
        }
        any |= bad && 16 * m + 8 * r < rows_left;
      }
    return any;
  }

  __device__ __forceinline__ bool out_is_finite() const {
    float zero = 0.0f;  // else NaN
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int d = 0; d < kD; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) zero = fmaf(out[m][d][e], 0.0f, zero);
    return zero == 0.0f;
  }

  /// Adds up the sums of the four lanes that hold the row.
  __device__ __forceinline__ float row_sum(int m, int r) const { return sum_of_row(sum[m][r]); }

 private:
  /// The weight of a product. For floats the stabiliser is subtracted before the product is scaled, so that no large
  /// score is rounded; floats have no row terms.
  template <bool kRounds>
  __device__ __forceinline__ static float weight(float product, float scale, float term, float base) {
    if constexpr (Unit::kNatural) {
      return Unit::exp(product - base, scale);
    } else {
      return Unit::exp(kRounds ? fmaf(product, scale, term) - base : fmaf(product, scale, term - base));
    }
  }

  /// What a row is multiplied by when its stabiliser changes by -difference.
  __device__ __forceinline__ static float shrink(float difference, float scale) {
    if constexpr (Unit::kNatural) {
      return Unit::exp(difference, scale);
    } else {
      return Unit::exp(difference);
    }
  }

  __device__ __forceinline__ void multiply(int m, int r, float factor) {
    sum[m][r] *= factor;
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      out[m][d][2 * r] *= factor;
      out[m][d][2 * r + 1] *= factor;
    }
  }

  __device__ __forceinline__ static void add_up(const Scores& p, float (&of_tile)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_tile[m][r] = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) of_tile[m][r] += p[m][n][2 * r + c];  // in the order of exponentiate()
      }
  }

  /// Moves the exponent of sums beyond the limit into the stabiliser, as long as a power of 2 can undo it. Else the sum
  /// becomes Inf, which shows in the end.
  __device__ __forceinline__ void lower(Scores& p, float (&of_tile)[kM][2], float scale) {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float largest = max_of_row(of_tile[m][r]);
        const bool beyond = largest > Config::kSumLimit && largest < 0x1p120f;
        const float exponent = beyond ? floorf(log2f(largest)) : 0.0f;
        const float before = stabiliser[m][r];
        stabiliser[m][r] += Unit::kNatural ? __fdividef(exponent, scale * kLog2E) : exponent;
        // A product may be rounded in the sum; a row that has seen no key has no stabiliser.
        const float factor = !Unit::kNatural ? Unit::exp(-exponent)
                             : beyond        ? shrink(before - stabiliser[m][r], scale)
                                             : 1.0f;
        of_tile[m][r] = largest >= 0x1p120f ? INFINITY : of_tile[m][r] * factor;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          p[m][n][2 * r] *= factor;
          p[m][n][2 * r + 1] *= factor;
        }
        multiply(m, r, factor);
      }
  }
};

}  // namespace flash_ext::sm80
