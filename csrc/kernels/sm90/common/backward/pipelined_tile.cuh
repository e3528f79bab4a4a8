// A warp's tile of scores in registers, transposed: 16 keys (rows) by kBlockM queries; and the operations on it in the
// pipelined loop, where row terms are in registers before they are needed.
#pragma once

#include <cstdint>

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/mask/bits.cuh"
#include "kernels/common/score/softcap.h"
#include "kernels/ptx/stmatrix.h"
#include "score_tile.cuh"

namespace flash_ext::sm90 {

template <class Element, int kBlockM>
struct BackwardPipelinedTile : BackwardTile<Element, kBlockM> {
  using Base = BackwardTile<Element, kBlockM>;
  using Scores = typename Base::Scores;
  using Weights = typename Base::Weights;
  using Base::for_each_pair, Base::kSteps;
  /// lse or D: step k has those of queries 16 k + 2 t, + 1, + 8 and + 9, with t = lane % 4.
  using Terms = float4[kSteps];
  /// A word for each of the lane's keys g and g + 8, with g = lane / 4. Bit 15 - n says whether query 8 n + 2 t sees
  /// the key, bit 31 - n whether query 8 n + 2 t + 1 does.
  using Visible = uint32_t[2];
  /// Words of kept weights of two consecutive queries of each sixteen, as keep_pair() takes them.
  using Kept = uint2[kSteps];

  /// Reads the row terms of steps [kBegin, kEnd).
  template <int kBegin = 0, int kEnd = kSteps>
  __device__ __forceinline__ static void load(Terms& terms, const float* s_terms, int lane) {
    const float4* const s_lane = reinterpret_cast<const float4*>(s_terms) + ptx::reread(lane) % 4;
#pragma unroll
    for (int k = kBegin; k < kEnd; ++k) terms[k] = s_lane[4 * k];
  }

  /// Whether some query of the tile has an lse that is Inf or NaN. Called by a whole warp.
  __device__ __forceinline__ static bool has_non_finite(const Terms& lse) {
    float trace = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      trace = fmaf(0.0f, lse[k].x, fmaf(0.0f, lse[k].y, fmaf(0.0f, lse[k].z, fmaf(0.0f, lse[k].w, trace))));
    return __any_sync(~0u, trace != 0.0f);
  }

  /// Computes P from products; `scale` and lse to base 2.
  __device__ __forceinline__ static void softmax_step(Weights& p, const Scores& s, const Terms& lse, float scale) {
    softmax_step(p, s, lse, [&](float x, float term, int, int) { return fmaf(x, scale, -term); });
  }
  /// Computes P from exponents to base 2: exponent(product, lse, n, e) for element e of accumulator n.
  template <class Exponent>
  __device__ __forceinline__ static void softmax_step(Weights& p, const Scores& s, const Terms& lse,
                                                      Exponent exponent) {
    for_each_pair([&](int k, int e, int n, int r) {
      const float2 term = pair_of(lse[k], e / 2);
      p[k][e] = ptx::pack2<Element>(ptx::exp2_approx(exponent(s[0][n][2 * r], term.x, n, 2 * r)),
                                    ptx::exp2_approx(exponent(s[0][n][2 * r + 1], term.y, n, 2 * r + 1)));
    });
  }

  /// Computes P with a bias of 16 bits. `s_row`: where the lane's row of the bias begins (BackwardTile::row_of_lane).
  /// rest(lse, r): what else is added to the scores of the lane's key r.
  template <class Rest>
  __device__ __forceinline__ static void softmax_step_bias(Weights& p, const Scores& s, const Terms& lse, float scale,
                                                           uint32_t s_row, Rest rest) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t bias[4];
      Base::load(bias, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int n = 2 * k + e / 2, r = e % 2;
        const float2 term = pair_of(lse[k], e / 2), added = ptx::unpack2<Element>(bias[e]);
        const float low = fmaf(added.x, kLog2E, rest(term.x, r)), high = fmaf(added.y, kLog2E, rest(term.y, r));
        p[k][e] = ptx::pack2<Element>(ptx::exp2_approx(fmaf(s[0][n][2 * r], scale, low)),
                                      ptx::exp2_approx(fmaf(s[0][n][2 * r + 1], scale, high)));
      }
    }
  }

  /// Computes P of scores with a softcap, and in `sloped` P times the derivative of the softcap. `scale`: from products
  /// to the argument of tanh; `cap` to base 2.
  __device__ __forceinline__ static void softmax_step_softcap(Weights& p, Weights& sloped, const Scores& s,
                                                              const Terms& lse, float scale, float cap) {
    for_each_pair([&](int k, int e, int n, int r) {
      const float x = softcap_tanh<Element>(s[0][n][2 * r] * scale),
                  y = softcap_tanh<Element>(s[0][n][2 * r + 1] * scale);
      Base::softcap_pair(p[k][e], sloped[k][e], {x, y}, pair_of(lse[k], e / 2), cap);
    });
  }

  /// Computes what dropout keeps of P.
  __device__ __forceinline__ static void keep(Weights& kept, const Weights& p, const Kept& words) {
    for_each_pair(
        [&](int k, int e, int n, int r) { kept[k][e] = keep_pair(p[k][e], words[k].x, words[k].y, n % 2 * 2 + r); });
  }

  /// dS = P (dP - D)
  __device__ __forceinline__ static void compute_ds(Weights& ds, const Scores& dp, const Weights& p,
                                                    const Terms& minus_delta) {
    for_each_pair([&](int k, int e, int n, int r) {
      const float2 term = pair_of(minus_delta[k], e / 2), weight = ptx::unpack2<Element>(p[k][e]);
      ds[k][e] = ptx::pack2<Element>(weight.x * (dp[0][n][2 * r] + term.x), weight.y * (dp[0][n][2 * r + 1] + term.y));
    });
  }

  /// Computes dS = P' dP - P D, where P' is what dropout keeps of P. On entry ds holds P. A dP that is NaN stays NaN in
  /// dS.
  __device__ __forceinline__ static void compute_ds_kept(Weights& ds, const Scores& dp, const Weights& kept,
                                                         const Terms& minus_delta) {
    for_each_pair([&](int k, int e, int n, int r) {
      const float2 term = pair_of(minus_delta[k], e / 2);
      const float2 weight = ptx::unpack2<Element>(ds[k][e]), left = ptx::unpack2<Element>(kept[k][e]);
      ds[k][e] = ptx::pack2<Element>(fmaf(left.x, dp[0][n][2 * r], weight.x * term.x),
                                     fmaf(left.y, dp[0][n][2 * r + 1], weight.y * term.y));
    });
  }

  /// Finds the pairs that the window and the lengths leave visible.
  __device__ __forceinline__ static void find_visible(Visible& visible, const Sequence& sequence, int first_key,
                                                      int first_query, int lane) {
    const typename Base::Bounds bounds(sequence, first_key, first_query, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The queries [begin, end) see the key, counted from the lane's first.
      const int begin = 8 * r - bounds.first_end + 1;
      const int end = 8 * r < bounds.end_of_all ? min(8 * r - bounds.first_begin + 1, bounds.queries) : 0;
      visible[r] = TransposedOrder::between(begin, end);
    }
  }

  /// Zeroes P or dS of hidden pairs, even NaN: another key may have made the query's lse NaN, and the hidden key's V
  /// may have made dP NaN.
  __device__ __forceinline__ static void hide(Weights& pairs, const Visible& visible) {
    for_each_pair([&](int k, int e, int n, int r) { pairs[k][e] &= TransposedOrder::mask_of_pair(visible[r], n); });
  }

  /// Bounds P by 1, for rows with a LargeLse.
  __device__ __forceinline__ static void bound(Weights& p) {
    for_each_pair([&](int k, int e, int, int) {
      const float2 pair = ptx::unpack2<Element>(p[k][e]);
      p[k][e] = ptx::pack2<Element>(LargeLse::bound(pair.x), LargeLse::bound(pair.y));
    });
  }

  /// Stores to panels of 32 queries, kPanelBytes apart, whose rows are keys. The 16-byte chunks of a row are permuted
  /// by two bits of the row's number, those above the last one ("64-byte swizzle"). Lanes name rows as in store().
  template <int kPanelBytes>
  __device__ __forceinline__ static void store_by_half_panels(uint32_t s_panel, int warp, const Weights& pairs,
                                                              int lane) {
    constexpr int kRowBytes = kPanelRowBytes / 2;
    const int at = ptx::reread(lane), row = warp * 16 + at % 16;
    const uint32_t s_chunk = s_panel + row * kRowBytes + ((at / 16) ^ (row / 2 % 4)) * 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      ptx::stmatrix_x4((s_chunk ^ (k % 2 * 32)) + k / 2 * kPanelBytes, pairs[k][0], pairs[k][1], pairs[k][2],
                       pairs[k][3]);
  }
  /// Stores to a panel whose rows are keys and whose columns are the queries; a warp has 16 rows of it. A lane names a
  /// row of one of four 8 x 8 matrices: two of keys by two of queries.
  __device__ __forceinline__ static void store(uint32_t s_panel, int warp, const Weights& pairs, int lane) {
    static_assert(kBlockM <= kPanelColumns);
    const int at = ptx::reread(lane), row = warp * 16 + at % 16;
    const uint32_t s_chunk = s_panel + row * kPanelRowBytes + ((at / 16) ^ (row % 8)) * 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      ptx::stmatrix_x4(s_chunk ^ (k * 32), pairs[k][0], pairs[k][1], pairs[k][2], pairs[k][3]);
  }

 private:
  static_assert(kBlockM <= 128, "there is a bit for each of a lane's queries");

  __device__ __forceinline__ static float2 pair_of(const float4& four, int half) {
    return half ? float2{four.z, four.w} : float2{four.x, four.y};
  }
};

}  // namespace flash_ext::sm90
