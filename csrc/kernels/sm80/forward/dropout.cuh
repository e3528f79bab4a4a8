// Dropout in a class of its own: draws stand between the products, which leave the time for them.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/ptx/reread.h"
#include "storage.cuh"

namespace flash_ext::sm80 {

struct NoRandomBits {};

/// The draws of a warp for a tile: a call for 32 keys, two rows of a lane (m), and every second of its keys (c).
template <class Config>
struct WarpRandomBits {
  static constexpr int kM = Config::kWarpRows / 16;
  static constexpr int kCalls = 2 * kM;  // for 32 keys

  /// The words of all calls for 32 keys, drawn ahead.
  struct Ahead {
    PhiloxWords words[kCalls];
  };

  RandomKey key;
  uint32_t query_group;  // of the lane's first rows
  uint32_t s_keys;       // KeyRandomBits of the lane's first keys

  __device__ __forceinline__ WarpRandomBits(const ForwardWorkTile<Config>& work_tile, const PhiloxKey& seeds,
                                            uint32_t s_tile, int warp_row, int lane)
      : key{{seeds.seed_lo, seeds.seed_hi, 0u}, work_tile.options.dropout.batch_head},
        query_group(static_cast<uint32_t>((work_tile.first_query + warp_row) / 2 + lane / 4)),
        s_keys(s_tile + 2 * (lane % 4) * static_cast<uint32_t>(sizeof(KeyRandomBits))) {}

  /// What the draws for the keys of a tile share, by the first threads of the CTA. A barrier must follow.
  __device__ __forceinline__ static void share(const ForwardWorkTile<Config>& work_tile, const PhiloxKey& seeds,
                                               uint32_t s_tile, int tile) {
    constexpr uint32_t kGroups = Config::kBlockN / 4;
    if (threadIdx.x >= kGroups) return;
    const Dropout& dropout = work_tile.options.dropout;
    const RandomKey key = {{seeds.seed_lo, seeds.seed_hi, dropout.key.offset_lo}, dropout.batch_head};
    store_shared(s_tile + threadIdx.x * sizeof(KeyRandomBits), KeyRandomBits::of(key, tile * kGroups + threadIdx.x));
  }

  __device__ __forceinline__ PhiloxWords draw(int half, int call) const {
    const auto keys = load_shared<KeyRandomBits>(s_keys + (8 * half + call / kM) * sizeof(KeyRandomBits));
    return random_words(key, QueryRandomBits::of(key, query_group + 8 * (call % kM)), keys);
  }

  /// The same, here and not where the words are needed.
  __device__ __forceinline__ void draw_now(PhiloxWords& words, int half, int call) const {
    words = draw(half, call);
#pragma unroll
    for (int w = 0; w < 4; ++w) words.word[w] = ptx::reread(words.word[w]);
  }

  /// What a call drops of `half` of the weights, which are packed by 16 keys.
  template <class A, int kSteps>
  __device__ __forceinline__ static void drop(A (&weights)[kSteps][kM], const PhiloxWords& words, uint32_t last_dropped,
                                              int half, int call) {
    const uint32_t other = call / kM == 0 ? 0xFFFF0000u : 0x0000FFFFu;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      A& a = weights[2 * half + w / 2][call % kM];
      if (words.word[w] << 16 <= last_dropped) a.r[w % 2 * 2] &= other;
      if (words.word[w] <= last_dropped) a.r[w % 2 * 2 + 1] &= other;
    }
  }
};

}  // namespace flash_ext::sm80
