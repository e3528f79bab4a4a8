// Dropout's random bits. Two calls of Philox (philox.h) decide 32 weights; a call has 7 rounds of two products each.
// Its counters are the groups of the query and of the key, the head and the offset, and a round mixes them in pairs
// only. In the first three rounds all products but one depend on the query alone or on the key alone. Computed once for
// a query group and once for a key group, these save a call 5 of its 14 products.
#pragma once

#include "kernels/params.h"
#include "kernels/ptx/pair_masks.h"
#include "philox.h"

namespace flash_ext {

/// The seeds in uniform registers: a warp reduction leaves its result there, and values computed from it follow.
__device__ __forceinline__ PhiloxKey uniform_seeds(const DropoutParams& p) {
  PhiloxKey seeds = philox_key(p.rng[0], p.rng[1]);
  seeds.seed_lo = __reduce_or_sync(~0u, seeds.seed_lo);
  seeds.seed_hi = __reduce_or_sync(~0u, seeds.seed_hi);
  return seeds;
}

/// The round keys and the head's counter.
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

/// What all calls for a query group share: the first product of the second round, for both calls.
struct QueryRandomBits {
  PhiloxProduct product[2];

  __device__ __forceinline__ static QueryRandomBits of(const RandomKey& key, uint32_t query_group) {
    const uint32_t of_head = PhiloxProduct::second(key.batch_head).high ^ key.key0(0);
    return {{PhiloxProduct::first(of_head ^ 2 * query_group), PhiloxProduct::first(of_head ^ (2 * query_group + 1))}};
  }
};

/// What all calls for a key group share: all but one product of the second round and of the third.
struct alignas(16) KeyRandomBits {
  uint32_t mixed;         // xored with the query's product: the factor of the third round's second product
  uint32_t word0, word2;  // words of the third round, without that product and without the query's
  uint32_t word3;

  __device__ __forceinline__ static KeyRandomBits of(const RandomKey& key, uint32_t key_group) {
    const PhiloxProduct first = PhiloxProduct::first(key_group);
    const PhiloxProduct second = PhiloxProduct::second(first.high ^ key.seeds.offset_lo ^ key.key1(0));
    const PhiloxProduct third =
        PhiloxProduct::first(second.high ^ PhiloxProduct::second(key.batch_head).low ^ key.key0(1));
    return {first.low ^ key.key1(1), second.low ^ key.key0(2), third.high ^ key.key1(2), third.low};
  }
};

/// The words of one call, as philox4x32() gives them.
__device__ __forceinline__ PhiloxWords random_words(const RandomKey& key, const PhiloxProduct& query,
                                                    const KeyRandomBits& keys) {
  const PhiloxProduct product = PhiloxProduct::second(query.high ^ keys.mixed);
  uint32_t c0 = product.high ^ keys.word0, c1 = product.low, c2 = query.low ^ keys.word2, c3 = keys.word3;
#pragma unroll
  for (int round = 3; round < kPhiloxRounds; ++round) {
    const PhiloxProduct p0 = PhiloxProduct::first(c0), p1 = PhiloxProduct::second(c2);
    c0 = p1.high ^ c1 ^ key.key0(round);
    c1 = p1.low;
    c2 = p0.high ^ c3 ^ key.key1(round);
    c3 = p0.low;
  }
  return {{c0, c1, c2, c3}};
}

/// Gives what draw_kept_weights() of philox.h gives.
__device__ __forceinline__ uint32_t draw_kept_weights(const DropoutRule& rule, const RandomKey& key,
                                                      const QueryRandomBits& query, const KeyRandomBits& keys) {
  return kept_weights(rule, random_words(key, query.product[0], keys), random_words(key, query.product[1], keys));
}

/// Drops weights of a pair of 16-bit weights. The first becomes 0 if the sign bit of byte number `byte` of x is 0, the
/// second if that of y is.
__device__ __forceinline__ uint32_t keep_pair(uint32_t pair, uint32_t x, uint32_t y, int byte) {
  return pair & ptx::pair_byte_signs(x, y, byte);
}

/// Drops packed weights, which lie as accumulators whose rows are queries: 64 keys, in steps of 16. Register 2 r + h of
/// a step has the keys 8 r + 2 (lane % 4) + {0, 1} of row lane / 4 + 8 h.
__device__ __forceinline__ void keep_weights(uint32_t (&step)[4], uint32_t kept, int number_of_step) {
  const uint32_t x = kept << number_of_step, y = kept << (number_of_step + 4);
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int h = 0; h < 2; ++h) step[2 * r + h] = keep_pair(step[2 * r + h], x, y, 2 * h + r);
}

/// Words of kept weights of a tile of kQueries in shared memory, for accumulators whose rows are keys: a lane has few
/// keys of a word there, so the warps compute the words together.
template <int kQueries>
struct KeptTile {
  static constexpr int kWordsOfGroup = kQueries * 2;  // of 64 keys
  static constexpr int bytes(int keys) { return (keys + kDropoutKeys - 1) / kDropoutKeys * kWordsOfGroup * 4; }

  /// The first query and the first key of a word, counted from the tile's first query and from the first key of the
  /// group of 64 in which the tile begins.
  __device__ __forceinline__ static int query(uint32_t word) { return word % kWordsOfGroup / 32 * 16 + word % 8; }
  __device__ __forceinline__ static int key(uint32_t word) {
    return word / kWordsOfGroup * kDropoutKeys + word / 8 % 4 * 2;
  }
  /// The byte offset of two words of sixteen queries: those of the lane's queries 2 (lane % 4) and the next. The lane
  /// shifts them by shift().
  __device__ __forceinline__ static uint32_t at(uint32_t key_group, uint32_t lane) {
    return 4 * (key_group * kWordsOfGroup + lane / 8 * 8 + lane % 4 * 2);
  }
  static constexpr uint32_t kStepBytes = 32 * 4;  // to the next sixteen queries
  /// The shift for the lane's keys among the 16 from first_key on. Byte 2 h + r then has the sign of query 8 h and key
  /// 8 r.
  __device__ __forceinline__ static int shift(uint32_t first_key, uint32_t lane) {
    return lane / 4 % 2 * 4 + first_key / 16 % 4;
  }
};

}  // namespace flash_ext
