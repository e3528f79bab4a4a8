// Philox4x32-7 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3") addressed by coordinates.
//
// Whether dropout keeps weight (batch, head, i, j) depends only on (seed, offset) and those four numbers, so every
// tiling on every device has the same mask. Two calls decide 32 weights with eight bits each: the queries
// {i, i + 8} of a 16-row group and the keys {j, j + 1} + {0, 8, ..., 56} of a 64-key group, j even. That is what one
// thread of a forward holds of 64 keys in the accumulator layout of mma.sync and wgmma.
//
// Word k of the two calls holds bit k of all 32 numbers. So one logical operation per word compares them with a
// threshold (kept_weights) and leaves one bit per weight. The position of that bit (dropout_bit) suits the instructions
// that turn bits into masks: shifted left by 0 to 7, a word has the bits of {i, i + 8} x {j, j + 8} in the sign bits of
// its four bytes.
#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace flash_ext {

constexpr int kPhiloxRounds = 7;  // the fewest with which Philox4x32 passes BigCrush in the paper
constexpr int kDropoutKeys = 64;  // of a group

struct PhiloxKey {
  uint32_t seed_lo, seed_hi, offset_lo;
};

struct PhiloxWords {
  uint32_t word[4];
};

FLASH_EXT_HOST_DEVICE PhiloxKey philox_key(int64_t seed, int64_t offset) {
  const uint64_t s = static_cast<uint64_t>(seed);
  const uint64_t o = static_cast<uint64_t>(offset);
  return {static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32) ^ static_cast<uint32_t>(o >> 32),
          static_cast<uint32_t>(o)};
}

FLASH_EXT_HOST_DEVICE PhiloxWords philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                             uint32_t k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// A weight is kept when its eight-bit number is at least this threshold: p in multiples of 1/256. A p strictly between
/// 0 and 1 is never rounded to 0 or 1.
FLASH_EXT_HOST_DEVICE uint32_t dropout_threshold(double p) {
  if (p <= 0.0) return 0;
  if (p >= 1.0) return 256;
  const uint32_t nearest = static_cast<uint32_t>(p * 256.0 + 0.5);
  return nearest < 1 ? 1 : nearest > 255 ? 255 : nearest;
}

/// Dropout's constants, computed from p.
struct DropoutRule {
  uint32_t threshold = 0;  // of dropout_threshold()
  // takes_or[k] is all ones if bit k of the threshold is 0, so that compare_bits() combines that bit by `or`; else 0,
  // for `and`. The comparison starts with all weights kept or, at a threshold of 256, with none.
  uint32_t start = ~0u, takes_or[8] = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
  double keep_scale = 1.0;  // multiplies kept weights: 1 / (1 - p) with the rounded p, so the expectation is exact
};

FLASH_EXT_HOST_DEVICE DropoutRule dropout_rule(double p) {
  DropoutRule rule;
  rule.threshold = dropout_threshold(p);
  const bool drops_all = rule.threshold == 256;
  rule.start = drops_all ? 0u : ~0u;
  for (int k = 0; k < 8; ++k) rule.takes_or[k] = drops_all || (rule.threshold >> k & 1u) ? 0u : ~0u;
  rule.keep_scale = drops_all ? 0.0 : 256.0 / (256.0 - rule.threshold);
  return rule;
}

/// Compares four bits of each number, from first_bit on, with the threshold; lower bits come before higher ones. A 1
/// where the threshold has a 0 keeps the weight, a 0 where it has a 1 drops it, and equal bits leave it as it was.
FLASH_EXT_HOST_DEVICE uint32_t compare_bits(const DropoutRule& rule, uint32_t kept, const PhiloxWords& words,
                                            int first_bit) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int k = 0; k < 4; ++k) kept = (kept & words.word[k]) | (rule.takes_or[first_bit + k] & (kept | words.word[k]));
  return kept;
}

/// One bit for each weight of a group: whether its number is at least the threshold. Word k holds bit k of all numbers.
FLASH_EXT_HOST_DEVICE uint32_t kept_weights(const DropoutRule& rule, const PhiloxWords& low, const PhiloxWords& high) {
  return compare_bits(rule, compare_bits(rule, rule.start, low, 0), high, 4);
}

/// The group of query i. The two calls for it have the second counters 2 * group and 2 * group + 1.
FLASH_EXT_HOST_DEVICE uint32_t dropout_query_group(int64_t i) { return static_cast<uint32_t>((i >> 4) * 8 + (i & 7)); }
/// The group of key j: the first counter of both calls.
FLASH_EXT_HOST_DEVICE uint32_t dropout_key_group(int64_t j) {
  return static_cast<uint32_t>((j >> 6) * 4 + ((j >> 1) & 3));
}
/// The position of the bit of weight (i, j).
FLASH_EXT_HOST_DEVICE int dropout_bit(int64_t i, int64_t j) {
  return static_cast<int>(16 * ((i >> 3) & 1) + 8 * ((j >> 3) & 1) + 7 - 4 * (j & 1) - ((j >> 4) & 3));
}

/// kept_weights() of the group of (i, j).
FLASH_EXT_HOST_DEVICE uint32_t draw_kept_weights(const DropoutRule& rule, const PhiloxKey& key, int64_t batch_head,
                                                 int64_t i, int64_t j) {
  const uint32_t query = 2 * dropout_query_group(i), keys = dropout_key_group(j);
  const uint32_t head = static_cast<uint32_t>(batch_head);
  const PhiloxWords low = philox4x32(keys, query, head, key.offset_lo, key.seed_lo, key.seed_hi);
  const PhiloxWords high = philox4x32(keys, query + 1, head, key.offset_lo, key.seed_lo, key.seed_hi);
  return kept_weights(rule, low, high);
}

}  // namespace flash_ext
