// Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers: as easy as 1, 2, 3") addressed by coordinates.
//
// Whether dropout keeps score (batch, head, i, j) depends on nothing but (seed, offset) and those four numbers, so
// every tiling on every device draws the same mask. One call decides eight scores with 16 bits each:
// the queries {i, i + 8} of a 16-row group and the keys {j, j + 8, j + 16, j + 24} of a 32-key group, which is what
// one thread holds of a score tile in the accumulator layout of mma.sync and wgmma.
#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace flash_ext {

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

FLASH_EXT_HOST_DEVICE PhiloxWords philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                                uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
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

/// The words that decide the group of (i, j); element (i, j) reads half (i % 16) / 8 of word (j % 32) / 8.
FLASH_EXT_HOST_DEVICE PhiloxWords dropout_words(const PhiloxKey& key, int64_t batch_head, int64_t i, int64_t j) {
  const uint32_t key_group = static_cast<uint32_t>((j >> 5) * 8 + (j & 7));
  const uint32_t query_group = static_cast<uint32_t>((i >> 4) * 8 + (i & 7));
  return philox4x32_10(key_group, query_group, static_cast<uint32_t>(batch_head), key.offset_lo, key.seed_lo,
                       key.seed_hi);
}

FLASH_EXT_HOST_DEVICE uint32_t dropout_bits(const PhiloxWords& words, int64_t i, int64_t j) {
  return (words.word[(j >> 3) & 3] >> (((i >> 3) & 1) * 16)) & 0xFFFFu;
}

/// A score is kept when its 16 bits are at least this; p is thereby rounded to a multiple of 2^-16.
FLASH_EXT_HOST_DEVICE uint32_t dropout_threshold(double p) { return static_cast<uint32_t>(p * 65536.0 + 0.5); }

/// What kept scores are multiplied by so that the expectation is right: 1 / (1 - p) of the rounded p, 0 for p = 1.
FLASH_EXT_HOST_DEVICE double dropout_keep_scale(double p) {
  const uint32_t threshold = dropout_threshold(p);
  return threshold < 65536u ? 65536.0 / (65536.0 - threshold) : 0.0;
}

}  // namespace flash_ext
