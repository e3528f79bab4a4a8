// From S^T to P^T, and from dP^T to dS^T, under the options of a call.
#pragma once

#include <cfloat>

#include "kernels/common/backward/options.cuh"
#include "kernels/common/dropout/random_bits.cuh"
#include "products.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardSoftmax : BackwardProducts<Config> {
  using Base = BackwardProducts<Config>;
  using Base::Base;
  using Base::coordinates, Base::first_column, Base::first_pair, Base::first_row, Base::for_each_with_term,
      Base::gradient_tile, Base::has, Base::is_partial, Base::kBlockM, Base::kBlockN, Base::kBoundsWeights,
      Base::keep_weights, Base::kM, Base::kN, Base::kPacked, Base::kWeightsInRegisters, Base::lane,
      Base::lane_of_scores, Base::lse_stage, Base::p, Base::r_weights, Base::rematerialise, Base::s_bias, Base::s_kept,
      Base::s_minus_delta, Base::s_words, Base::store_weights, Base::term_at, Base::weight_tile, Base::work_tile;
  using typename Base::Element, typename Base::Kept, typename Base::Scores, typename Base::Unit;

  /// Turns S^T into P^T in place.
  __device__ __forceinline__ void exponentiate(float (&s)[kM][kN][4], const BackwardStep& step, int n) const {
    const float scale = work_tile.scale;
    for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = Unit::weight(x, scale, lse); });
    if (!is_partial(step)) return;
    hide(s, coordinates(step, lane), 0.0f);
    if (kBoundsWeights && work_tile.large) for_each_score(s, [](float& x, int, int, int) { x = LargeLse::bound(x); });
  }

  /// Replaces the weights outside of the window, or their exponents, even if they are NaN: another key may have made
  /// the query's lse NaN. Queries past the last one have weights of 0, because their lse is inf.
  __device__ __forceinline__ void hide(float (&weights)[kM][kN][4], const TileCoordinates<true>& at,
                                       float hidden) const {
    const Sequence& sequence = work_tile.sequence;
    const int end = at.first_column + sequence.offset + sequence.right + 1 - at.first_row;
    const int end_of_all = sequence.seqlen_k - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) >= min(end + 8 * n + e % 2, end_of_all)) x = hidden;
    });
    if (sequence.left >= sequence.seqlen_q + sequence.seqlen_k) return;
    const int begin = at.first_column + sequence.offset - sequence.left - at.first_row;
    for_each_score(weights, [&](float& x, int m, int n, int e) {
      if (16 * m + 8 * (e / 2) < begin + 8 * n + e % 2) x = hidden;
    });
  }

  /// The same under all options. It also stores P^T times the derivative of the softcap, for dropped weights too, where
  /// dS^T will lie.
  __device__ __forceinline__ void exponentiate_with_options(float (&s)[kM][kN][4], const PreparedStep& now, int n) {
    const BackwardOptions& options = work_tile.options;
    const int lane = rematerialise(this->lane);
    const TileCoordinates<true> at = coordinates(now.step, lane);
    scale_and_cap(s, n);
    if (now.slope != 0.0f) {
      const int distance = at.first_column + work_tile.sequence.offset - at.first_row;
      AlibiOfLane<true>{now.slope, static_cast<float>(distance)}.add(s);
    }
    if (options.biased) add_bias<Unit, kBlockN>(s, p.bias.dtype, s_bias, first_column, first_row, lane);
    if constexpr (Unit::kNatural) for_each_with_term(s, lse_stage(n), [](float& x, float lse) { x -= lse; });
    if (now.flags & kStepPartial) {
      hide(s, at, -INFINITY);
      if (kBoundsWeights && work_tile.large)
        for_each_score(s, [](float& x, int, int, int) { x = ptx::min_or_nan(x, 0.0f); });
    }
    if (now.flags & kStepMasked)
      hide_by_words(s, s_words + 4 * (first_row / 32 * kBlockM + first_column + 2 * (lane % 4)), lane);
    for_each_score(s, [](float& x, int, int, int) { x = Unit::exp(x); });

    if constexpr (kPacked) keep_weights(s);
    if (options.drops) {
      options.cap > 0.0f ? store_for_gradient<true, true>(s, n) : store_for_gradient<false, true>(s, n);
    } else {
      options.cap > 0.0f ? store_for_gradient<true, false>(s, n) : store_for_gradient<false, false>(s, n);
    }
    if constexpr (!kWeightsInRegisters) {
      store_weights(weight_tile(n), s);
    } else if constexpr (!kPacked) {
      keep_weights(s);
    }
  }

  /// Turns products into scores, up to the terms that are added. In base 2 it also subtracts lse, which costs nothing
  /// there; natural scores must first be rounded as the forward's were. It stores the derivative of the softcap where
  /// dS^T will lie.
  __device__ __forceinline__ void scale_and_cap(float (&s)[kM][kN][4], int n) const {
    const BackwardOptions& options = work_tile.options;
    const float scale = options.scale, cap = options.cap;
    // A sum that overflowed must not make hidden scores NaN. A query that sees it has it in lse.
    const auto scaled = [&](float x) { return fminf(Unit::multiply(x, scale), FLT_MAX); };
    if (cap > 0.0f) {
      const uint32_t s_lane = gradient_tile(n) + lane_of_scores();
      for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(scaled(x)); });
#pragma unroll
      for (int column = 0; column < kN; column += 2)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          float slope[2][4];
#pragma unroll
          for (int k = 0; k < 8; ++k) slope[k / 4][k % 4] = softcap_slope(s[m][column + k / 4][k % 4]);
          Scores::store_c(s_lane, 16 * m, first_pair() + column / 2, slope[0], slope[1]);
        }
      __syncwarp();
      if constexpr (Unit::kNatural) {
        for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, cap); });
      } else {
        for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = fmaf(x, cap, -lse); });
      }
    } else if constexpr (Unit::kNatural) {
      for_each_score(s, [&](float& x, int, int, int) { x = scaled(x); });
    } else if (options.biased) {
      for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = scaled(x) - lse; });
    } else {
      for_each_with_term(s, lse_stage(n), [&](float& x, float lse) { x = fmaf(x, scale, -lse); });
    }
  }

  /// Stores P^T, times the derivative of the softcap, for the dS warps. Dropped weights then become 0, but not in what
  /// is stored: dS^T needs them.
  template <bool kCaps, bool kDrops>
  __device__ __forceinline__ void store_for_gradient(float (&s)[kM][kN][4], int n) {
    const uint32_t s_lane = gradient_tile(n) + lane_of_scores();
    const uint32_t s_slopes =
        gradient_tile(n) + Scores::lane_a_of_c(lane) + rematerialise(first_row) * Scores::kRowBytes;
    uint2 kept = {};
#pragma unroll
    for (int column = 0; column < kN; column += 2) {
      if (kDrops && column % 8 == 0) kept = kept_weights(n, column / 2);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const int pair = first_pair() + column / 2, shift = column % 8 + m;
        if constexpr (kPacked) {
          uint32_t(&weights)[4] = r_weights[column / 2][m].r;
          uint32_t stored[4] = {weights[0], weights[1], weights[2], weights[3]};
          typename Scores::A slopes;
          if constexpr (kCaps) Scores::load_a_of_c(slopes, s_slopes, 16 * m, pair);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if constexpr (kCaps) stored[k] = multiply_pairs<Element>(stored[k], slopes.r[k]);
            if constexpr (kDrops) weights[k] = keep_pair(weights[k], kept.x << shift, kept.y << shift, k);
          }
          Scores::store_a_as_c(s_lane, 16 * m, pair, stored);
        } else {
          float stored[2][4];
          if constexpr (kCaps) Scores::load_c(s_lane, 16 * m, pair, stored[0], stored[1]);
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            float& weight = s[m][column + k / 4][k % 4];
            stored[k / 4][k % 4] = kCaps ? stored[k / 4][k % 4] * weight : weight;
            if (kDrops && !((k % 2 ? kept.y : kept.x) >> (k / 2 * 8 + 7 - shift) & 1u)) weight = 0.0f;
          }
          Scores::store_c(s_lane, 16 * m, pair, stored[0], stored[1]);
        }
      }
    }
  }

  /// Turns dP^T - D into dS^T in place: calls gradient(x, weight, m, column, e) for each element.
  template <class F>
  __device__ __forceinline__ void compute_ds(float (&s)[kM][kN][4], int n, F gradient) const {
    const uint32_t s_lane = (Config::kHasOptions ? gradient_tile(n) : weight_tile(n)) + lane_of_scores();
#pragma unroll
    for (int column = 0; column < kN; column += 2)
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        float weights[2][4];
        Scores::load_c(s_lane, 16 * m, first_pair() + column / 2, weights[0], weights[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < 4; ++e) gradient(s[m][column + h][e], weights[h][e], m, column + h, e);
      }
  }

  /// Turns dP^T - D into dS^T. Where P is 0 the rest may be NaN, from keys that the query does not see; in a full tile
  /// it sees all keys. dP of a dropped weight is 0.
  __device__ __forceinline__ void compute_ds(float (&s)[kM][kN][4], const PreparedStep& now, int n) const {
    if constexpr (Config::kHasOptions) {
      if (work_tile.options.drops) {
        uint2 kept;
        return compute_ds(s, n, [&](float& x, float weight, int m, int column, int e) {
          const float2 minus_delta = load_shared<float2>(s_minus_delta + term_at(column));
          if (column % 8 == 0 && m == 0 && e == 0) kept = kept_weights(n, column / 2);
          const int bit = column % 2 * 16 + e / 2 * 8 + 7 - (column % 8 / 2 * 2 + m);
          const bool is_kept = (e % 2 ? kept.y : kept.x) >> bit & 1u;
          const float ds = weight * (is_kept ? x : e % 2 ? minus_delta.y : minus_delta.x);
          x = weight == 0.0f ? 0.0f : ds;
        });
      }
    }
    if (has(now, kStepPartial | kStepMayHide)) {
      compute_ds(s, n, [](float& x, float weight, int, int, int) { x = weight == 0.0f ? 0.0f : weight * x; });
    } else {
      compute_ds(s, n, [](float& x, float weight, int, int, int) { x *= weight; });
    }
  }

  /// Reads which of a lane's weights of 64 queries are kept: x has those of its queries 2 (lane % 4) of each 8, y those
  /// of the query after. Shifted by 2 (sixteen of the queries) + (sixteen of the keys), bytes have the signs that
  /// keep_pair() takes.
  __device__ __forceinline__ uint2 kept_weights(int n, int first_sixteen) const {
    static_assert(kM == 2);
    constexpr uint32_t kBothKeys = 0xC0C0C0C0u;
    const int lane = rematerialise(this->lane), shift = Kept::shift(work_tile.first_key + first_row, lane);
    const uint32_t s_lane = s_kept + n % 2 * Config::kKeptBytes + Kept::at(first_row / kDropoutKeys, lane) +
                            (first_column / 16 + first_sixteen) * Kept::kStepBytes;
    uint2 kept = {0, 0};
#pragma unroll 1
    for (int k = 0; k < (kN < 8 ? kN / 2 : 4); ++k) {
      const auto words = load_shared<uint2>(s_lane + k * Kept::kStepBytes);
      kept.x |= (words.x << shift & kBothKeys) >> 2 * k;
      kept.y |= (words.y << shift & kBothKeys) >> 2 * k;
    }
    return kept;
  }
};

}  // namespace flash_ext::sm80
