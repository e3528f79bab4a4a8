// A warp's tile of scores in registers, transposed: 16 keys (rows) by kBlockM queries; and the operations on it between
// products, one pass each.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/score/scores.cuh"
#include "kernels/common/score/softcap.h"
#include "kernels/common/tile.cuh"
#include "kernels/ptx/arithmetic.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/pair_masks.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/stmatrix_trans.h"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "kernels/sm90/common/score_operand.cuh"

namespace flash_ext::sm90 {

template <class Element, int kBlockM>
struct BackwardTile {
  static constexpr int kN = kBlockM / 8;
  static constexpr int kSteps = kBlockM / 16;     // of products over queries
  static constexpr uint32_t kSigns = 0x80008000;  // of both 16-bit numbers of a register
  using Scores = float[1][kN][4];
  using Weights = uint32_t[kSteps][4];  // P or dS as an operand: pair r of accumulator n in register 4 k + e = 2 n + r

  /// Calls f(x, term, n, e) for every score and its query's term of s_terms.
  template <class F>
  __device__ __forceinline__ static void for_each_with_term(Scores& s, const float* s_terms, int lane, F f) {
    const float* const s_lane = s_terms + 2 * (ptx::reread(lane) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[0][n][e], e % 2 ? term.y : term.x, n, e);
    }
  }

  /// Replaces products by P; `scale` and lse in units of scores.
  template <class Unit = BaseTwoUnit>
  __device__ __forceinline__ static void softmax_step(Scores& s, const float* s_lse, float scale, int lane) {
    for_each_with_term(s, s_lse, lane, [&](float& x, float lse, int, int) { x = Unit::weight(x, scale, lse); });
  }

  /// The pairs that the window and the lengths leave visible, counted from the lane's first key and query.
  struct Bounds {
    int first_begin, first_end, end_of_all, queries;

    __device__ __forceinline__ Bounds(const Sequence& sequence, int first_key, int first_query, int lane) {
      const auto at = TileCoordinates<true>::of_lane(first_key, first_query, ptx::reread(lane));
      first_begin = at.first_column + sequence.offset - sequence.left - at.first_row;
      first_end = at.first_column + sequence.offset + sequence.right + 1 - at.first_row;
      end_of_all = sequence.seqlen_k - at.first_row;
      queries = sequence.seqlen_q - at.first_column;
    }
  };

  /// Zeroes weights that the window or the lengths hide, even NaN: a query may have an lse of NaN because of another
  /// key.
  __device__ __forceinline__ static void hide(Scores& s, const Sequence& sequence, int first_key, int first_query,
                                              int lane) {
    const Bounds bounds(sequence, first_key, first_query, lane);
    for_each_score(s, [&](float& x, int, int n, int e) {
      const int column = 8 * n + e % 2, row = 8 * (e / 2);
      const bool visible = row >= bounds.first_begin + column &&
                           row < min(bounds.first_end + column, bounds.end_of_all) && column < bounds.queries;
      if (!visible) x = 0.0f;
    });
  }
  /// The same for packed pairs, without branches of single lanes: after such a branch ptxas keeps nothing in uniform
  /// registers.
  __device__ __forceinline__ static void hide(Weights& weights, const Sequence& sequence, int first_key,
                                              int first_query, int lane) {
    const Bounds bounds(sequence, first_key, first_query, lane);
    const auto mask = [&](int column, int row, uint32_t half) {
      const bool visible = (row >= bounds.first_begin + column) &
                           (row < min(bounds.first_end + column, bounds.end_of_all)) & (column < bounds.queries);
      return visible ? half : 0u;
    };
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        weights[n / 2][n % 2 * 2 + r] &= mask(8 * n, 8 * r, 0xFFFFu) | mask(8 * n + 1, 8 * r, 0xFFFF0000u);
  }

  /// Calls f(step, element of the operand, n, r) for each pair: elements 2 r and 2 r + 1 of accumulator n.
  template <class F>
  __device__ __forceinline__ static void for_each_pair(F f) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(k, e, 2 * k + e / 2, e % 2);
  }
  /// Whether some number of the warp is NaN, or two of them are infinite and differ. It costs half of what zeroing
  /// costs.
  __device__ __forceinline__ static bool holds_nan(const Weights& pairs) {
    uint32_t sum = 0;
    for_each_pair([&](int k, int e, int, int) { sum = ptx::add_pairs<Element>(sum, pairs[k][e]); });
    return __any_sync(~0u, ptx::differs<Element>(sum, sum) != 0);
  }
  /// Zeroes pairs whose weight is 0.
  __device__ __forceinline__ static void hide_weightless(Weights& pairs, const Weights& p) {
    for_each_pair([&](int k, int e, int, int) { pairs[k][e] &= ptx::differs<Element>(p[k][e], 0); });
  }

  /// Zeroes pairs that words hide. A word has 32 keys of a query: those of two warps. s_words: where the words of these
  /// keys begin in shared memory.
  __device__ __forceinline__ static void hide_by_words(Weights& pairs, uint32_t s_words, int warp, int lane) {
    const int at = ptx::reread(lane), shift = 7 - at / 4;
    const uint32_t keys_of_warp = warp % 2 ? 0x7632 : 0x5410;  // of two words, as __byte_perm takes them
    const uint32_t s_lane = s_words + 8 * (at % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint2 words = load_shared<uint2>(s_lane + 32 * n);
      const uint32_t visible = __byte_perm(words.x, words.y, keys_of_warp) << shift;
      pairs[n / 2][n % 2 * 2] &= ptx::spread_low_signs(visible);
      pairs[n / 2][n % 2 * 2 + 1] &= ptx::spread_signs(visible);
    }
  }

  /// Computes P of a pair of scores with a softcap, and P times the softcap's derivative. `tanh` and `lse` have the
  /// values of both; `cap` and lse to base 2.
  __device__ __forceinline__ static void softcap_pair(uint32_t& p, uint32_t& sloped, float2 tanh, float2 lse,
                                                      float cap) {
    const float low = ptx::exp2_approx(fmaf(tanh.x, cap, -lse.x)), high = ptx::exp2_approx(fmaf(tanh.y, cap, -lse.y));
    p = ptx::pack2<Element>(low, high);
    sloped = ptx::pack2<Element>(low * softcap_slope(tanh.x), high * softcap_slope(tanh.y));
  }

  /// Computes dS from dP; ds may be p. With `hides`, dS becomes 0 where the weight is 0: dP may be NaN there, from keys
  /// that the query does not see.
  __device__ __forceinline__ static void compute_ds(Weights& ds, const Scores& dp, const Weights& p,
                                                    const float* s_minus_delta, int lane, bool hides) {
    const float* const s_lane = s_minus_delta + 2 * (ptx::reread(lane) % 4);
    if (hides) {
      compute_ds(ds, dp, p, s_lane, [](float x, float weight) { return weight == 0.0f ? 0.0f : weight * x; });
    } else {
      compute_ds(ds, dp, p, s_lane, [](float x, float weight) { return weight * x; });
    }
  }

  /// The same with dropout. keep(n, r, pair) zeroes the dropped weights of a pair, for which dP is 0; p becomes the
  /// kept weights. kZeroes: dS becomes 0 where the weight is 0; else it may be NaN where a pair is hidden.
  template <bool kZeroes, class Keep>
  __device__ __forceinline__ static void compute_ds_kept(Weights& ds, const Scores& dp, Weights& p,
                                                         const float* s_minus_delta, int lane, Keep keep) {
    const float* const s_lane = s_minus_delta + 2 * (ptx::reread(lane) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t& pair = p[n / 2][n % 2 * 2 + r];
        const float2 p_pair = ptx::unpack2<Element>(pair);
        const uint32_t seen = kZeroes ? ptx::differs<Element>(pair, 0) : ~0u;
        pair = keep(n, r, pair);
        const float2 kept = ptx::unpack2<Element>(pair);
        const uint32_t gradients = ptx::pack2<Element>(fmaf(kept.x, dp[0][n][2 * r], p_pair.x * term.x),
                                                       fmaf(kept.y, dp[0][n][2 * r + 1], p_pair.y * term.y));
        ds[n / 2][n % 2 * 2 + r] = gradients & seen;
      }
    }
  }

  /// The same where the sign of a weight says that dropout dropped it: dP of the pair is 0 then. dS becomes 0 where the
  /// weight is 0.
  __device__ __forceinline__ static void compute_ds_signed(Weights& ds, const Scores& dp, const Weights& p,
                                                           const float* s_minus_delta, int lane) {
    const float* const s_lane = s_minus_delta + 2 * (ptx::reread(lane) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = p[n / 2][n % 2 * 2 + r], weights = pair & ~kSigns;
        const float2 weight = ptx::unpack2<Element>(weights);
        const float2 kept = ptx::unpack2<Element>(weights & ~ptx::spread_signs(pair));
        const uint32_t gradients = ptx::pack2<Element>(fmaf(kept.x, dp[0][n][2 * r], weight.x * term.x),
                                                       fmaf(kept.y, dp[0][n][2 * r + 1], weight.y * term.y));
        ds[n / 2][n % 2 * 2 + r] = gradients & ptx::differs<Element>(weights, 0);
      }
    }
  }

  /// Where the lane's row of the warp's part of a panel begins. The panel's rows are queries, and its columns the 64
  /// keys of four warps. A lane names a row of one of four 8 x 8 matrices: two of queries by two of keys.
  __device__ __forceinline__ static uint32_t row_of_lane(uint32_t s_panel, int warp, int lane) {
    const int at = ptx::reread(lane), row = at % 8 + at / 16 * 8;
    const uint32_t chunk = (2 * warp + at / 8 % 2) ^ (at % 8);
    return s_panel + row * kPanelRowBytes + chunk * 16;
  }
  /// Stores to such a panel and loads from it, 16 queries at a time.
  __device__ __forceinline__ static void store(uint32_t s_row, int step, const uint32_t (&pairs)[4]) {
    ptx::stmatrix_x4_trans(s_row + step * 16 * kPanelRowBytes, pairs);
  }
  __device__ __forceinline__ static void load(uint32_t (&pairs)[4], uint32_t s_row, int step) {
    ptx::ldmatrix_x4_trans(pairs, s_row + step * 16 * kPanelRowBytes);
  }
  __device__ __forceinline__ static void store(uint32_t s_row, const Weights& weights) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) store(s_row, step, weights[step]);
  }
  __device__ __forceinline__ static void load(Weights& weights, uint32_t s_row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load(weights[step], s_row, step);
  }

  /// Zeroes pairs that a bias in such a panel hides by -inf; its elements T have 16 bits. Otherwise such pairs may be
  /// NaN, from a sum that overflowed.
  template <class T>
  __device__ __forceinline__ static void hide_by_bias(Weights& pairs, uint32_t s_row) {
    constexpr uint32_t kHidden = std::is_same_v<T, __half> ? 0xFC00FC00u : 0xFF80FF80u;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t bias[4];
      load(bias, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) pairs[k][e] &= ptx::differs<T>(bias[e], kHidden);
    }
  }

 private:
  template <class F>
  __device__ __forceinline__ static void compute_ds(Weights& ds, const Scores& dp, const Weights& p,
                                                    const float* s_lane, F gradient) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 weight = ptx::unpack2<Element>(p[n / 2][n % 2 * 2 + r]);
        ds[n / 2][n % 2 * 2 + r] = ptx::pack2<Element>(gradient(dp[0][n][2 * r] + term.x, weight.x),
                                                       gradient(dp[0][n][2 * r + 1] + term.y, weight.y));
      }
    }
  }
};

}  // namespace flash_ext::sm90
