// From products q k^T to scores, on tiles of accumulators: scale, softcap, ALiBi and bias.
#pragma once

#include "alibi.cuh"
#include "bias_rows.cuh"
#include "kernels/common/accumulators.cuh"
#include "kernels/common/dropout/dropout.cuh"
#include "kernels/common/host_device.h"
#include "kernels/common/mask/window.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/params.h"
#include "row_end.cuh"
#include "softcap.h"
#include "units.cuh"

namespace flash_ext {

/// The factor that turns products into scores where there is no softcap. `per_natural`: kPerNatural of the unit of
/// scores.
FLASH_EXT_HOST_DEVICE float score_scale(const AttentionParams& p, float per_natural) {
  return static_cast<float>(p.softmax_scale) * per_natural;
}

/// The factors of a call's scale and softcap. Computing them divides doubles; where registers are short the host does
/// it, and kernels read the result from constant memory.
struct ScoreFactors {
  float scale;  // of products; with softcap: to the argument of tanh
  float cap;    // 0 = off

  FLASH_EXT_HOST_DEVICE ScoreFactors(float scale, float cap) : scale(scale), cap(cap) {}
  FLASH_EXT_HOST_DEVICE ScoreFactors(const AttentionParams& p, float per_natural)
      : ScoreFactors(p.softcap > 0.0 ? static_cast<float>(p.softmax_scale / p.softcap) : score_scale(p, per_natural),
                     static_cast<float>(p.softcap) * per_natural) {}

  /// Computes the factors for the backward, with a scale that is rounded once.
  FLASH_EXT_HOST_DEVICE static ScoreFactors of_backward(const AttentionParams& p, float per_natural) {
    return {static_cast<float>(p.softcap > 0.0 ? p.softmax_scale / p.softcap : p.softmax_scale * per_natural),
            static_cast<float>(p.softcap) * per_natural};
  }
};

/// Scale, softcap, ALiBi and bias of one head. It does not hide anything.
template <class Element>
struct ScoreRules {
  using Unit = ScoreUnit<Element>;

  float scale, cap;  // of ScoreFactors
  float slope;
  int diagonal;  // key that query 0 is aligned with
  int seqlen_q, seqlen_k;
  BiasRows bias;

  __device__ __forceinline__ ScoreRules(const AttentionParams& p, const Sequence& sequence)
      : ScoreRules(p, sequence, ScoreFactors(p, Unit::kPerNatural)) {}

  __device__ __forceinline__ ScoreRules(const AttentionParams& p, const Sequence& sequence, const ScoreFactors& factors)
      : scale(factors.scale),
        cap(factors.cap),
        slope(p.alibi_slopes ? p.alibi_slopes[sequence.batch * p.alibi_batch_stride + sequence.head] * Unit::kPerNatural
                             : 0.0f),
        diagonal(sequence.offset),
        seqlen_q(sequence.seqlen_q),
        seqlen_k(sequence.seqlen_k),
        bias(p.bias, sequence) {}

  /// Turns products into scores, without the terms that are added.
  template <int kM, int kN>
  __device__ __forceinline__ void scale_and_cap(float (&s)[kM][kN][4]) const {
    if (cap > 0.0f) {
      for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(cap, softcap_tanh<Element>(x * scale)); });
    } else {
      for_each_score(s, [&](float& x, int, int, int) { x = Unit::multiply(x, scale); });
    }
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void add_alibi(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    if (slope == 0.0f) return;
    const int distance = at.query(0, 0, 0) + diagonal - at.key(0, 0, 0);
    AlibiOfLane<kTransposed>{slope, static_cast<float>(distance)}.add(s);
  }

  template <bool kTransposed, int kM, int kN>
  __device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const TileCoordinates<kTransposed>& at) const {
    bias.with_type([&](auto type) {
      for_each_score(s, [&](float& x, int m, int n, int e) {
        const int i = at.query(m, n, e), j = at.key(m, n, e);
        if (i >= seqlen_q || j >= seqlen_k) return;
        const float b = bias.template load<decltype(type)>(i, j);
        x = with_bias(x, b, [](float y) { return y * Unit::kPerNatural; });
      });
    });
  }
};

}  // namespace flash_ext
