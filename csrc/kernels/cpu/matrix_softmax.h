// The softmax step of a panel whose P goes to matrix units: it rounds P to bfloat16 and packs it in pairs of keys.
// Exponentials limit the forward on matrix units, so this step takes fewer instructions for each than online_softmax.h:
//   t = (x - m) factor log2(e),   P = 2^(t - floor t) 2^floor t:   one instruction gives the fraction, one the power.
// `factor` is the scale of the scores, if nothing but a mask comes between them and the products x. The row's
// stabiliser m is one of the products, so that x - m is exact near m. m stays the same until a score exceeds it by more
// than kMaxExcess: so O is seldom rescaled, and P keeps its relative precision, as bfloat16 has float's exponent.
#pragma once

#include "online_softmax.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// How far scores may exceed the stabiliser. e^8 times the largest number of keys is far below the largest float.
constexpr float kMaxExcess = 8;

#if defined(__AMX_BF16__)

/// 2^t, t at most kMaxExcess log2(e): relative error 1e-7, exactly 1 at 0, 0 below the normal numbers, NaN for NaN.
/// The polynomial is the best one of its degree on [0, 1).
FLASH_EXT_INLINE __m512 exp2_of_scores(__m512 t) {
  constexpr int kMinusFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  const Vec<float> r = _mm512_reduce_ps(t, kMinusFloor);
  Vec<float> y = 0.001867130069869513f * r + 0.009017030322460233f;
  y = y * r + 0.0557999131037236f;
  y = y * r + 0.24016445015509394f;
  y = y * r + 0.693151311804601f;
  y = y * r + 1.0f;
  const __mmask16 normal = _mm512_cmp_ps_mask(t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(normal, y, t);
}

/// The stabilisers of a column for the next step.
FLASH_EXT_INLINE Vec<float> next_stabiliser(Vec<float> before, Vec<float> maximum, float factor) {
  constexpr float kFarFromInfinity = 1e30f;  // -inf has to stay what it is
  return maximum > before + min(kMaxExcess / factor, kFarFromInfinity) ? maximum : before;
}

/// The number that is subtracted from products. A row that has seen no key yet gets 0, since -inf + inf would be NaN. A
/// row with an infinite score gets NaN, so that all its weights are NaN.
FLASH_EXT_INLINE Vec<float> shift_of(Vec<float> stabiliser, float factor) {
  const Vec<float> finite = stabiliser == -kInfinity ? Vec<float>{} : stabiliser;
  return finite * factor == kInfinity ? broadcast<float>(kInfinity - kInfinity) : finite;
}

/// Computes P = e^((x - shift) factor) of the keys [begin, end) of a column, packs it from `pairs` on, and returns its
/// sum. It writes all depths that these keys touch, with zeros for other keys.
FLASH_EXT_INLINE Vec<float> pack_column_exp(uint32_t* pairs, const float* x, int64_t begin, int64_t end, float factor,
                                            Vec<float> shift) {
  constexpr float kLog2e = 1.4426950408889634f;
  const Vec<float> to_base_2 = broadcast<float>(factor * kLog2e);
  const auto weight = [&](int64_t key) __attribute__((always_inline))->Vec<float> {
    return exp2_of_scores((load(x + key * kBlockSide) - shift) * to_base_2);
  };
  const auto weight_or_zero = [&](int64_t key) __attribute__((always_inline)) {
    return key >= begin && key < end ? weight(key) : Vec<float>{};
  };
  Vec<float> sum[2] = {};
  const auto pack = [&](int64_t key, Vec<float> first, Vec<float> second) __attribute__((always_inline)) {
    sum[0] += first;
    sum[1] += second;
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
    _mm512_storeu_si512(pairs + key / 2 * kTileSide, interleave(halves));
  };
  const int64_t last = round_up(end, kTileDepth), first_pair = round_up(begin, 2), last_pair = end / 2 * 2;
  int64_t key = begin / kTileDepth * kTileDepth;
  for (; key < first_pair; key += 2) pack(key, weight_or_zero(key), weight_or_zero(key + 1));
  for (; key < last_pair; key += 2) pack(key, weight(key), weight(key + 1));
  for (; key < last; key += 2) pack(key, weight_or_zero(key), weight_or_zero(key + 1));
  return sum[0] + sum[1];
}

/// Does one step over the rows of `scores`, which hold products to be multiplied by `factor` > 0. `pairs` receives P.
/// The state's maximum is a product, too. `row_maxima`, if wanted, receives the largest product of each query so far,
/// because the state's maximum may lag behind.
inline void softmax_step_packed(SoftmaxState<float>& state, uint32_t* pairs, const ScorePanel<float>& scores,
                                float factor, int vectors, float* row_maxima) {
  for (int c = 0; c < vectors * kTileSide; c += kTileSide) {
    const float* column = scores.s + c;
    const Vec<float> before = load(state.maximum + c);
    const Vec<float> largest =
        column_maximum(column + scores.begin * kBlockSide, scores.end - scores.begin, broadcast<float>(-kInfinity));
    if (row_maxima != nullptr) store(row_maxima + c, vector_max(largest, load(row_maxima + c)));
    const Vec<float> maximum = next_stabiliser(before, largest, factor);
    const Vec<float> shift = shift_of(maximum, factor);
    const Vec<float> alpha = exp<float>((before - shift) * factor);
    const Vec<float> sum =
        pack_column_exp(pairs + c * kKeyTileDepths * kTileSide, column, scores.begin, scores.end, factor, shift);
    store(state.maximum + c, maximum);
    store(state.alpha + c, alpha);
    store(state.sum + c, load(state.sum + c) * alpha + sum);
  }
}

#endif  // __AMX_BF16__

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
