// Dropout's draws. A call of Philox (philox.h) is 10 rounds of two products. What it starts from is the group of the
// query, that of the key, the head and the offset, which a round mixes in pairs only: the products of the first three
// rounds depend on the query alone, or on the key alone, but for one. So a call costs a lane that is given what belongs
// to the keys 15 products instead of 20.
#pragma once

#include "kernels/params.h"
#include "philox.h"

namespace flash_ext {

/// Reductions leave the seeds in uniform registers, and so all that is made of them.
__device__ __forceinline__ PhiloxKey uniform_seeds(const DropoutParams& p) {
  PhiloxKey seeds = philox_key(p.rng[0], p.rng[1]);
  seeds.seed_lo = __reduce_or_sync(~0u, seeds.seed_lo);
  seeds.seed_hi = __reduce_or_sync(~0u, seeds.seed_hi);
  return seeds;
}

/// The keys of the rounds, for a head.
struct RandomKey {
  PhiloxKey seeds;
  uint32_t batch_head;

  __device__ __forceinline__ uint32_t key0(int round) const { return seeds.seed_lo + round * 0x9E3779B9u; }
  __device__ __forceinline__ uint32_t key1(int round) const { return seeds.seed_hi + round * 0xBB67AE85u; }
};

struct PhiloxProduct {
  uint32_t low, high;

  __device__ __forceinline__ static PhiloxProduct first(uint32_t x) { return of(0xD2511F53u, x); }
  __device__ __forceinline__ static PhiloxProduct second(uint32_t x) { return of(0xCD9E8D57u, x); }

 private:
  __device__ __forceinline__ static PhiloxProduct of(uint32_t factor, uint32_t x) {
    const uint64_t product = static_cast<uint64_t>(factor) * x;
    return {static_cast<uint32_t>(product), static_cast<uint32_t>(product >> 32)};
  }
};

/// What the calls for a group of queries share: the first product of the second round.
struct QueryRandomBits {
  PhiloxProduct product;

  __device__ __forceinline__ static QueryRandomBits of(const RandomKey& key, uint32_t query_group) {
    return {PhiloxProduct::first(PhiloxProduct::second(key.batch_head).high ^ query_group ^ key.key0(0))};
  }
};

/// What the calls for a group of keys share: of the second round and the third all but one product each.
struct alignas(16) KeyRandomBits {
  uint32_t mixed;         // with the query's product: what the third round's second product is of
  uint32_t word0, word2;  // the third round's words, but for that product, and for the query's
  uint32_t word3;

  __device__ __forceinline__ static KeyRandomBits of(const RandomKey& key, uint32_t key_group) {
    const PhiloxProduct first = PhiloxProduct::first(key_group);
    const PhiloxProduct second = PhiloxProduct::second(first.high ^ key.seeds.offset_lo ^ key.key1(0));
    const PhiloxProduct third =
        PhiloxProduct::first(second.high ^ PhiloxProduct::second(key.batch_head).low ^ key.key0(1));
    return {first.low ^ key.key1(1), second.low ^ key.key0(2), third.high ^ key.key1(2), third.low};
  }
};

/// As philox4x32_10().
__device__ __forceinline__ PhiloxWords random_words(const RandomKey& key, const QueryRandomBits& query,
                                                    const KeyRandomBits& keys) {
  const PhiloxProduct product = PhiloxProduct::second(query.product.high ^ keys.mixed);
  uint32_t c0 = product.high ^ keys.word0, c1 = product.low, c2 = query.product.low ^ keys.word2, c3 = keys.word3;
#pragma unroll
  for (int round = 3; round < 10; ++round) {
    const PhiloxProduct p0 = PhiloxProduct::first(c0), p1 = PhiloxProduct::second(c2);
    c0 = p1.high ^ c1 ^ key.key0(round);
    c1 = p1.low;
    c2 = p0.high ^ c3 ^ key.key1(round);
    c3 = p0.low;
  }
  return {{c0, c1, c2, c3}};
}

/// The same for two groups of queries, 8 apart, side by side: a round waits for the one before it.
__device__ __forceinline__ void random_words(PhiloxWords (&words)[2], const RandomKey& key, uint32_t query_group,
                                             const KeyRandomBits& keys) {
  uint32_t c[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const QueryRandomBits query = QueryRandomBits::of(key, query_group + 8 * m);
    const PhiloxProduct product = PhiloxProduct::second(query.product.high ^ keys.mixed);
    c[m][0] = product.high ^ keys.word0, c[m][1] = product.low;
    c[m][2] = query.product.low ^ keys.word2, c[m][3] = keys.word3;
  }
#pragma unroll
  for (int round = 3; round < 10; ++round)
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const PhiloxProduct p0 = PhiloxProduct::first(c[m][0]), p1 = PhiloxProduct::second(c[m][2]);
      c[m][0] = p1.high ^ c[m][1] ^ key.key0(round);
      c[m][1] = p1.low;
      c[m][2] = p0.high ^ c[m][3] ^ key.key1(round);
      c[m][3] = p0.low;
    }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int w = 0; w < 4; ++w) words[m].word[w] = c[m][w];
}

}  // namespace flash_ext
