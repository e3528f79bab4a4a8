// Dropout as the only option: random bits are computed between the products, which leave issue slots free.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/ptx/reread.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

struct NoRandomBits {};

/// The random bits of a warp for a tile: a word for each two rows of a lane (m).
template <class Config>
struct WarpRandomBits {
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kCalls = 2 * kM;  // of Philox

  struct Kept {
    uint32_t words[kM];
  };

  RandomKey key;
  uint32_t query_group;  // of the lane's first rows
  uint32_t s_keys;       // KeyRandomBits of the lane's keys

  __device__ __forceinline__ WarpRandomBits(const ForwardWorkTile<Config>& work_tile, const PhiloxKey& seeds,
                                            uint32_t s_tile, int warp_row, int lane)
      : key{{seeds.seed_lo, seeds.seed_hi, 0u}, work_tile.options.dropout.batch_head},
        query_group(dropout_query_group(work_tile.first_query + warp_row + lane / 4)),
        s_keys(s_tile + lane % 4 * static_cast<uint32_t>(sizeof(KeyRandomBits))) {}

  /// Computes what the words for the keys of a tile share, in the first threads of the CTA. A barrier must follow.
  __device__ __forceinline__ static void share(const ForwardWorkTile<Config>& work_tile, const PhiloxKey& seeds,
                                               uint32_t s_tile, int tile) {
    static_assert(Config::kBlockN == kDropoutKeys);
    constexpr uint32_t kDropoutGroups = Config::kBlockN / 16;
    if (threadIdx.x >= kDropoutGroups) return;
    const Dropout& dropout = work_tile.options.dropout;
    const RandomKey key = {{seeds.seed_lo, seeds.seed_hi, dropout.key.offset_lo}, dropout.batch_head};
    store_shared(s_tile + threadIdx.x * sizeof(KeyRandomBits),
                 KeyRandomBits::of(key, tile * kDropoutGroups + threadIdx.x));
  }

  /// Makes one of kCalls calls of Philox, in order. ptx::reread() keeps the computation here: ptxas would move it to
  /// where the word is needed.
  __device__ __forceinline__ void compute_kept(Kept& kept, const DropoutRule& rule, int call) const {
    uint32_t& word = kept.words[call / 2];
    const auto keys = load_shared<KeyRandomBits>(s_keys);
    const PhiloxProduct query = QueryRandomBits::of(key, query_group + 8 * (call / 2)).product[call % 2];
    const PhiloxWords words = random_words(key, query, keys);
    word = ptx::reread(compare_bits(rule, call % 2 == 0 ? rule.start : word, words, call % 2 * 4));
  }

  /// Zeroes dropped weights, which are packed by 16 keys.
  template <class A, int kSteps>
  __device__ __forceinline__ static void drop(A (&weights)[kSteps][kM], const Kept& kept) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m) keep_weights(weights[step][m].r, kept.words[m], step);
  }
};

}  // namespace flash_ext::sm80
