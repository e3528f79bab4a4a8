// Dropout of accumulators whose rows are queries; each weight has its bit in a Philox word.
#pragma once

#include "kernels/common/accumulators.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/params.h"
#include "kernels/ptx/reread.h"
#include "philox.h"

namespace flash_ext {

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

  /// Zeroes dropped weights. The caller scales kept weights.
  template <int kM, int kN>
  __device__ __forceinline__ void drop(float (&s)[kM][kN][4], const DropoutRule& rule,
                                       const TileCoordinates<false>& at) const {
    for_each_dropped(s, rule, at, [](float& x) { x = 0.0f; });
  }

  /// Applies a dropout mode of attention_weights (but not kDropoutIgnore) to weights or to their gradient.
  template <int kM, int kN>
  __device__ __forceinline__ void apply(float (&w)[kM][kN][4], const DropoutRule& rule, int mode,
                                        const TileCoordinates<false>& at) const {
    if (mode == kDropoutNegate) {
      for_each_dropped(w, rule, at, [](float& x) { x = -x; });
    } else {
      for_each_score(w, [&](float& x, int, int, int) { x *= keep_scale; });
      drop(w, rule, at);
    }
  }

  /// Calls f(x) for each dropped weight. Tiles start at multiples of 16 queries and of 64 keys, or have 32 keys. Then
  /// all weights of a word, or half of them, belong to one lane.
  template <int kM, int kN, class F>
  __device__ __forceinline__ void for_each_dropped(float (&s)[kM][kN][4], const DropoutRule& rule,
                                                   const TileCoordinates<false>& at, F f) const {
    constexpr int kTogether = kN < kDropoutKeys / 8 ? kN : kDropoutKeys / 8;
    static_assert(kN % kTogether == 0 && (kDropoutKeys / 8) % kTogether == 0 && kTogether % 4 == 0);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int first = 0; first < kN; first += kTogether) {
        // reread() keeps the compiler from computing addresses ahead of the loop, for which there are no registers.
        const int i = ptx::reread(at.row(m, 0)), j = ptx::reread(at.column(first, 0));
        const uint32_t kept = compute_kept(rule, i, j) << (j / 16 % 4);
#pragma unroll
        for (int n = 0; n < kTogether; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (!(kept >> dropout_bit(8 * (e / 2), 8 * n + e % 2) & 1u)) f(s[m][first + n][e]);
      }
  }

 private:
  /// Does what draw_kept_weights() does, with one call of Philox after the other: many kernels have no registers for
  /// both at once.
  __device__ __forceinline__ uint32_t compute_kept(const DropoutRule& rule, int i, int j) const {
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

}  // namespace flash_ext
