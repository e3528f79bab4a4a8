// Dropout of a panel: one factor for a kept score, another for a dropped one, by the Philox random bits
// of its coordinates (common/dropout/philox.h).
//
// A group has the queries {i, i + 8} and 16 of 64 keys. Eight neighbouring queries are therefore eight independent
// generators that run side by side in a vector.
#pragma once

#include "kernels/common/dropout/philox.h"
#include "score_panel.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

constexpr int kGroup = 8;
typedef uint32_t GroupWords __attribute__((vector_size(4 * kGroup)));

/// The high words of eight products. (Through a pointer: baseline x86 has no register to return a group in.)
FLASH_EXT_INLINE void multiply_high(const GroupWords& a, uint32_t b, GroupWords* high) {
#if defined(__AVX2__)
  const __m256i x = bit_cast<__m256i>(a);
  const __m256i y = _mm256_set1_epi32(static_cast<int>(b));
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(x, y), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), y);
  *high = bit_cast<GroupWords>(_mm256_blend_epi32(even, odd, 0xAA));
#else
  for (int l = 0; l < kGroup; ++l) (*high)[l] = static_cast<uint32_t>(static_cast<uint64_t>(a[l]) * b >> 32);
#endif
}

/// philox4x32 for eight values of the second counter word.
FLASH_EXT_INLINE void group_philox(uint32_t key_group, const GroupWords& second_words, uint32_t batch_head,
                                   const PhiloxKey& key, GroupWords* words) {
  GroupWords c0 = key_group - GroupWords{}, c1 = second_words, c2 = batch_head - GroupWords{};
  GroupWords c3 = key.offset_lo - GroupWords{};
  uint32_t k0 = key.seed_lo, k1 = key.seed_hi;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    GroupWords high0, high1;
    multiply_high(c0, 0xD2511F53u, &high0);
    multiply_high(c2, 0xCD9E8D57u, &high1);
    const GroupWords low0 = c0 * 0xD2511F53u, low1 = c2 * 0xCD9E8D57u;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

template <class T>
class Dropout {
 public:
  static constexpr int kPanel = Shape<T>::kPanel;

  explicit Dropout(const AttentionParams& p)
      : active_(p.dropout.rng != nullptr && p.dropout.rule.threshold > 0),
        rule_(p.dropout.rule),
        kept_scale_(static_cast<T>(rule_.keep_scale)) {
    if (active_) key_ = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  }

  bool active() const { return active_; }
  /// DropoutRule::keep_scale, 1 without dropout.
  T kept_scale() const { return kept_scale_; }

  /// factors[n][lane] = kept or dropped, for the rows of `scores`. All lanes are queries of one head, in order.
  void draw(T* factors, const ScorePanel<T>& scores, const Panel<T>& panel, int64_t batch_head, int64_t first_key,
            T kept, T dropped) const {
    if (panel.query[0] % kGroup != 0) {  // a block mask whose block_m is no multiple of 8
      draw_one_by_one(factors, scores, panel, batch_head, first_key, kept, dropped);
      return;
    }
    // Whole groups of 64 keys; rows outside the panel are drawn and not written.
    const Interval keys{first_key + scores.begin, first_key + scores.end};
    for (int64_t group = keys.begin / kDropoutKeys * kDropoutKeys; group < keys.end; group += kDropoutKeys) {
      for (int64_t j = group; j < group + 8; j += 2) {
        for (int lane = 0; lane < kPanel;) {
          const int64_t i = panel.query[0] + lane;
          const int groups = i % (2 * kGroup) == 0 && lane + 2 * kGroup <= kPanel ? 2 : 1;
          draw_groups(factors + lane, groups, keys, first_key, j, i, batch_head, kept, dropped);
          lane += groups * kGroup;
        }
      }
    }
  }

 private:
  /// Writes the factors of the queries [i, i + 8 * groups) and the keys {j, j + 1} + {0, 8, ..., 56}. One group uses
  /// half of the words, two use both halves.
  FLASH_EXT_INLINE void draw_groups(T* factors, int groups, const Interval& keys, int64_t first_key, int64_t j,
                                    int64_t i, int64_t batch_head, T kept, T dropped) const {
    GroupWords flags;
    draw_flags(i, j, batch_head, &flags);
    for (int n = 0; n < kDropoutKeys / 8; ++n) {
      for (int64_t key = j + 8 * n; key < j + 8 * n + 2; ++key) {
        if (key < keys.begin || key >= keys.end) continue;
        for (int group = 0; group < groups; ++group) {
          const GroupWords bits = flags & 1u << dropout_bit(i + group * kGroup, key);
          T* to = factors + (key - first_key) * kPanel + group * kGroup;
          for (int l = 0; l < kGroup; ++l) to[l] = bits[l] != 0 ? kept : dropped;
        }
      }
    }
  }

  /// draw_kept_weights() for eight queries from i on.
  FLASH_EXT_INLINE void draw_flags(int64_t i, int64_t j, int64_t batch_head, GroupWords* flags) const {
    const GroupWords lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const GroupWords query_groups = lanes + dropout_query_group(i & ~int64_t{7});
    GroupWords words[8];
    for (uint32_t call = 0; call < 2; ++call)
      group_philox(dropout_key_group(j), 2 * query_groups + call, static_cast<uint32_t>(batch_head), key_,
                   words + 4 * call);
    *flags = rule_.start - GroupWords{};
    for (int k = 0; k < 8; ++k) *flags = (*flags & words[k]) | (rule_.takes_or[k] & (*flags | words[k]));
  }

  void draw_one_by_one(T* factors, const ScorePanel<T>& scores, const Panel<T>& panel, int64_t batch_head,
                       int64_t first_key, T kept, T dropped) const {
    for (int64_t n = scores.begin; n < scores.end; ++n) {
      const int64_t j = first_key + n;
      for (int lane = 0; lane < kPanel; ++lane) {
        const int64_t i = panel.query[0] + lane;
        const uint32_t flags = draw_kept_weights(rule_, key_, batch_head, i, j);
        factors[n * kPanel + lane] = flags >> dropout_bit(i, j) & 1u ? kept : dropped;
      }
    }
  }

  bool active_;
  DropoutRule rule_;
  PhiloxKey key_{};
  T kept_scale_;
};

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
