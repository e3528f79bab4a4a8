// What the warps of a CTA share, after the tiles in shared memory: row terms, barriers, and the work tile. A barrier's
// name says what the end of its phase means.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

/// A step with options.
struct alignas(16) BackwardWideStep : BackwardStep {
  int is_masked;     // whether a mask, of pairs or of keys, hides some pair
  int is_sanitised;  // whether some pair may be hidden, and Q or dO may hold Inf or NaN
};

/// What options need. Words are those of one step: the warps that compute P wait for each other before and after they
/// write them.
template <class Config, bool kHasOptions = Config::kHasOptions>
struct BackwardWideOptionStorage {
  __device__ __forceinline__ void prepare(const BackwardParams&, const Sequence&) {}
};
template <class Config>
struct BackwardWideOptionStorage<Config, true> {
  static constexpr int kWordsOfGroup = KeptTile<Config::kBlockM>::kWordsOfGroup;
  static_assert(kWordsOfGroup == kWarpgroupThreads && Config::kBlockM * (kWarpgroupRows / 32) == kWarpgroupThreads,
                "each thread of the warpgroup computes one word of each");

  __align__(8) uint32_t kept[kWordsOfGroup];         // dropout's kept weights, as a KeptTile of the CTA's keys
  __align__(8) uint32_t visible[kWarpgroupThreads];  // by masks of pairs: word (group of 32 keys, query)
  float key_biases[kWarpgroupRows];                  // to base 2; of a key that is hidden: -inf
  BackwardWideStep steps[Config::kStages];           // they come with Q; past the last one, the head is past the group
  RandomKey random_key;                              // of dropout, for the first head

  __device__ __forceinline__ void prepare(const BackwardParams& p, const Sequence& sequence) {
    if (p.dropout.rule.threshold > 0)
      random_key = {philox_key(p.dropout.rng[0], p.dropout.rng[1]),
                    static_cast<uint32_t>(sequence.batch * p.heads_q + sequence.head)};
  }
};

/// Shared memory of the kernel for head dims above kMaxNarrowHeadDim.
template <class Config>
struct BackwardWideStorage : BackwardStagedTerms<Config>, BackwardWideOptionStorage<Config> {
  static constexpr int kStages = Config::kStages;

  uint64_t k_full, v_full, other_k_full;
  uint64_t q_full[kStages], q_empty[kStages];    // with lse
  uint64_t do_full[kStages], do_empty[kStages];  // with minus_delta
  uint64_t p_full, ds_full, other_ds_full, ds_empty;
  uint64_t sanitised;  // Q and dO of a tile that some key is hidden from
  BackwardWorkTile<Config> work_tile;

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int kReaders = 2 * kWarpgroupWarps;
    for (uint64_t* full : {&k_full, &v_full, &other_k_full, &other_ds_full}) init_barrier(*full, 1);
    init_barriers(q_full, 1);
    init_barriers(q_empty, kReaders);
    init_barriers(do_full, 1);
    init_barriers(do_empty, kReaders);
    init_barrier(sanitised, kReaders);
    init_barrier(p_full, kWarpgroupWarps);
    init_barrier(ds_full, kWarpgroupWarps);
    init_barrier(ds_empty, kWarpgroupWarps * Config::kCluster);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
