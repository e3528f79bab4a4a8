// What a score goes through between the product q k^T and the exponential, on tiles of accumulators, and how a row
// ends.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/common/dropout/philox.h"
#include "kernels/common/host_device.h"
#include "kernels/common/sequence.cuh"
#include "kernels/params.h"
#include "kernels/ptx/arithmetic.h"
#include "kernels/ptx/reread.h"

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

/// Where the elements of a lane's accumulators lie: element e of tile (m, n) is query i(m, n, e) and key j(m, n, e).
/// kTransposed: rows of the accumulators are keys.
template <bool kTransposed>
struct TileCoordinates {
  int first_row, first_column;  // of element 0 of tile (0, 0)

  __device__ __forceinline__ static TileCoordinates of_lane(int first_row, int first_column, int lane) {
    return {first_row + lane / 4, first_column + 2 * (lane % 4)};
  }
  __device__ __forceinline__ int row(int m, int e) const { return first_row + 16 * m + 8 * (e / 2); }
  __device__ __forceinline__ int column(int n, int e) const { return first_column + 8 * n + e % 2; }
  __device__ __forceinline__ int query(int m, int n, int e) const { return kTransposed ? column(n, e) : row(m, e); }
  __device__ __forceinline__ int key(int m, int n, int e) const { return kTransposed ? row(m, e) : column(n, e); }
};

/// Calls f(x, m, n, e) for every accumulator.
template <int kM, int kN, class F>
__device__ __forceinline__ void for_each_score(float (&s)[kM][kN][4], F f) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(s[m][n][e], m, n, e);
}

/// The bias of one head.
class BiasRows {
 public:
  __device__ __forceinline__ BiasRows(const ScoreView& bias, const Sequence& sequence)
      : data_(static_cast<const char*>(bias.data)),
        row_stride_(bias.row_stride),
        col_stride_(bias.col_stride),
        dtype_(bias.dtype) {
    const int64_t size = dtype_ == DType::kFloat32 ? 4 : dtype_ == DType::kFloat64 ? 8 : 2;
    if (data_) data_ += size * (sequence.batch * bias.batch_stride + sequence.head * bias.head_stride);
  }

  __device__ __forceinline__ bool present() const { return data_ != nullptr; }

  template <class T>
  __device__ __forceinline__ float load(int i, int j) const {
    return static_cast<float>(reinterpret_cast<const T*>(data_)[i * row_stride_ + j * col_stride_]);
  }

  /// Runs with a value of the element type: the switch is taken once for a whole tile.
  template <class Run>
  __device__ __forceinline__ void with_type(Run run) const {
    switch (dtype_) {
      case DType::kFloat16:
        return run(__half());
      case DType::kBFloat16:
        return run(__nv_bfloat16());
      case DType::kFloat32:
        return run(float());
      case DType::kFloat64:
        return run(double());
    }
  }

 private:
  const char* data_;
  int64_t row_stride_, col_stride_;
  DType dtype_;
};

/// What a call's scale and softcap come to. Doubles are divided: where registers are short the host does it, and
/// kernels find the result in constant memory.
template <class Unit>
struct ScoreFactors {
  float scale;  // of products; with softcap: to the argument of tanh
  float cap;    // 0 = off

  FLASH_EXT_HOST_DEVICE explicit ScoreFactors(const AttentionParams& p)
      : scale(p.softcap > 0.0 ? static_cast<float>(p.softmax_scale / p.softcap)
                              : static_cast<float>(p.softmax_scale) * Unit::kPerNatural),
        cap(static_cast<float>(p.softcap) * Unit::kPerNatural) {}
};

/// Scale, softcap, ALiBi and bias of one head. Visibility is not its matter.
template <class Element>
struct ScoreRules {
  using Unit = ScoreUnit<Element>;

  float scale, cap;  // of ScoreFactors
  float slope;
  int diagonal;  // key that query 0 is aligned with
  int seqlen_q, seqlen_k;
  BiasRows bias;

  __device__ __forceinline__ ScoreRules(const AttentionParams& p, const Sequence& sequence)
      : ScoreRules(p, sequence, ScoreFactors<Unit>(p)) {}

  __device__ __forceinline__ ScoreRules(const AttentionParams& p, const Sequence& sequence,
                                        const ScoreFactors<Unit>& factors)
      : scale(factors.scale),
        cap(factors.cap),
        slope(p.alibi_slopes ? p.alibi_slopes[sequence.batch * p.alibi_batch_stride + sequence.head] * Unit::kPerNatural
                             : 0.0f),
        diagonal(sequence.offset),
        seqlen_q(sequence.seqlen_q),
        seqlen_k(sequence.seqlen_k),
        bias(p.bias, sequence) {}

  __device__ __forceinline__ static float tanh(float x) {
    if constexpr (sizeof(Element) == 4) return tanhf(x);
    return ptx::tanh_approx(x);
  }

  /// Products to scores, but for the terms that are added.
  template <int kM, int kN>
  __device__ __forceinline__ void scale_and_cap(float (&s)[kM][kN][4]) const {
    if (cap > 0.0f) {
      for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(cap, tanh(x * scale)); });
    } else {
      for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, scale); });
    }
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void finish(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    scale_and_cap(s);
    add_terms(s, at);
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void add_alibi(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    if (slope == 0.0f) return;
    const float first = static_cast<float>(at.query(0, 0, 0) + diagonal - at.key(0, 0, 0));
    for_each_score(s, [&](float& x, int m, int n, int e) {
      const int down = 16 * m + 8 * (e / 2), along = 8 * n + e % 2;
      x = fmaf(-slope, fabsf(first + static_cast<float>(kTransposed ? along - down : down - along)), x);
    });
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    bias.with_type([&](auto type) {
      for_each_score(s, [&](float& x, int m, int n, int e) {
        const int i = at.query(m, n, e), j = at.key(m, n, e);
        if (i >= seqlen_q || j >= seqlen_k) return;
        const float b = bias.template load<decltype(type)>(i, j);
        x = b == -INFINITY ? -INFINITY : x + b * Unit::kPerNatural;  // hides even a score of NaN
      });
    });
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void add_terms(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    add_alibi(s, at);
    if (bias.present()) add_bias(s, at);
  }
};

/// Hides what the window and the lengths hide, by -inf.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void hide_outside_window(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at,
                                                    const Sequence& sequence) {
  if constexpr (kTransposed) {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = at.column(n, c);
        const int begin = i < sequence.seqlen_q ? sequence.keys_begin(i) - at.first_row : INT32_MAX;
        const int end = sequence.keys_end(i) - at.first_row;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (16 * m + 8 * r < begin || 16 * m + 8 * r >= end) s[m][n][2 * r + c] = -INFINITY;
      }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = at.row(m, 2 * r);
        const int begin = sequence.keys_begin(i) - at.first_column;
        const int end = sequence.keys_end(i) - at.first_column;
#pragma unroll
        for (int n = 0; n < kN; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (8 * n + c < begin || 8 * n + c >= end) s[m][n][2 * r + c] = -INFINITY;
      }
  }
}

/// Which weights dropout keeps, for one head.
struct Dropout {
  bool active;
  float keep_scale;
  PhiloxKey key;
  uint32_t batch_head;

  __device__ __forceinline__ Dropout(const AttentionParams& p, const Sequence& sequence)
      : active(p.dropout.rule.threshold > 0),
        keep_scale(static_cast<float>(p.dropout.rule.keep_scale)),
        key{},
        batch_head(static_cast<uint32_t>(sequence.batch * p.heads_q + sequence.head)) {
    if (active) key = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  }

  /// Zeroes what is dropped; kept weights are scaled by the caller.
  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&s)[kM][kN][4], const DropoutRule& rule,
                                       const TileCoordinates<false>& at) const {
    for_each_dropped(s, rule, at, [](float& x) { x = 0.0f; });
  }

  /// Calls f(x) for what is dropped. Rows are queries, tiles start at multiples of 16 queries and of 64 keys, or have
  /// 32 keys: then all weights of a word, or half of them, are those of one lane.
  template <int kM, int kN, class F>
  __device__ __forceinline__ void for_each_dropped(float (&s)[kM][kN][4], const DropoutRule& rule,
                                                   const TileCoordinates<false>& at, F f) const {
    constexpr int kTogether = kN < kDropoutKeys / 8 ? kN : kDropoutKeys / 8;
    static_assert(kN % kTogether == 0 && (kDropoutKeys / 8) % kTogether == 0 && kTogether % 4 == 0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int first = 0; first < kN; first += kTogether) {
        // There are no registers for what would follow from them outside of a loop.
        const int i = ptx::reread(at.row(m, 0)), j = ptx::reread(at.column(first, 0));
        const uint32_t kept = draw(rule, i, j) << (j / 16 % 4);
#pragma unroll
        for (int n = 0; n < kTogether; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!(kept >> dropout_bit(8 * (e / 2), 8 * n + e % 2) & 1u)) f(s[m][first + n][e]);
      }
  }

 private:
  /// draw_kept_weights(), one call after the other: many kernels have no registers for both at once.
  __device__ __forceinline__ uint32_t draw(const DropoutRule& rule, int i, int j) const {
    uint32_t kept = rule.start;
#pragma unroll
    for (int call = 0; call < 2; ++call) {
      const uint32_t query = ptx::reread(2 * dropout_query_group(i) + call);
      const PhiloxWords words =
          philox4x32(dropout_key_group(j), query, batch_head, key.offset_lo, key.seed_lo, key.seed_hi);
      kept = ptx::reread(compare_bits(rule, kept, words, 4 * call));
    }
    return kept;
  }
};

/// What normalises a row of out, and its log-sum-exp.
struct RowEnd {
  float scale;
  float lse;
};

/// `sum` is of exponentials of scores less reference * scale, `sink` a natural logarithm, -inf = none. A row that saw
/// nothing has sum 0; one with an infinite score has the weights Inf / Inf, and an infinite lse. That is rounded once:
/// a key far above all others has its very score for an lse, whatever the reference is.
template <class Unit = BaseTwoUnit>
__device__ __forceinline__ RowEnd finish_row(float reference, float sum, float sink, float scale = 1.0f) {
  if (sum == 0.0f) return {0.0f, -INFINITY};
  if (reference == INFINITY) return {NAN, INFINITY};
  if (sink == -INFINITY) return {1.0f / sum, fmaf(reference, scale * Unit::kNaturalPer, logf(sum))};
  if (sink == INFINITY) return {0.0f, INFINITY};
  const float score = reference * scale, of_sink = sink * Unit::kPerNatural, base = fmaxf(score, of_sink);
  const float shrink = Unit::exp(score - base);
  const float total = sum * shrink + Unit::exp(of_sink - base);
  return {shrink / total, base * Unit::kNaturalPer + logf(total)};
}

}  // namespace flash_ext
