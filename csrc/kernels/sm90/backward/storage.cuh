// What the warps of a CTA of the backward share, behind the tiles in shared memory: row terms, barriers, and the work
// tile. A barrier's name says what the end of its phase means.
#pragma once

#include <cstdint>

#include "kernels/common/ring.cuh"
#include "kernels/sm90/common/barriers.h"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// Metadata of the steps of a list, which comes with Q.
template <class Config, bool kListsBlocks = Config::kListsBlocks>
struct BackwardListedMetadata {};
template <class Config>
struct BackwardListedMetadata<Config, true> {
  ListedQueries step_metadata[Config::kStages];
};

/// Row terms of the stages of Q and dO.
template <class Config>
struct BackwardStagedTerms : BackwardListedMetadata<Config> {
  __align__(16) float lse[Config::kStages][Config::kBlockM];  // base 2
  __align__(16) float minus_delta[Config::kStages][Config::kBlockM];
};

/// Shared memory of the plain kernel.
template <class Config>
struct BackwardStorage : BackwardStagedTerms<Config> {
  static constexpr int kStages = Config::kStages;

  uint64_t k_full, v_full;
  uint64_t q_full[kStages], q_empty[kStages];    // with lse
  uint64_t do_full[kStages], do_empty[kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  BackwardWorkTile<Config> work_tile;

  /// The same as in BackwardPipelinedStorage.
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
  __device__ __forceinline__ void look_at_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kGroups * kWarpgroupWarps;
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(q_empty, kConsumers);
    init_barriers(do_full, 1);
    init_barriers(do_empty, kConsumers);
    init_barriers(ds_full, kConsumers);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

/// Shared memory of the pipelined kernel. Row terms are permuted (row_terms.cuh). No barrier says that a stage of Q or
/// dO is free: when dS of a step is complete, the stages of the step before are free.
template <class Config>
struct BackwardPipelinedStorage : BackwardStagedTerms<Config> {
  uint64_t k_full, v_full;
  uint64_t q_full[Config::kStages];   // with lse
  uint64_t do_full[Config::kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  BackwardWorkTile<Config> work_tile;

  /// What options need beside the work tile: prepare() by the thread that has set it, then look_at_masks() by all.
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
  __device__ __forceinline__ void look_at_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// Called by one thread.
  __device__ __forceinline__ void init() {
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(do_full, 1);
    init_barriers(ds_full, Config::kGroups * kWarpgroupWarps);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

constexpr int kNoMoreTiles = -1;

/// Shared memory of the persistent kernel: the same, with K, V and work tiles of two tiles of keys.
template <class Config>
struct BackwardPersistentStorage : BackwardStagedTerms<Config> {
  static constexpr int kSlots = Config::kKeySlots;

  uint64_t k_full[kSlots], v_full[kSlots];
  uint64_t q_full[Config::kStages];   // with lse
  uint64_t do_full[Config::kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  uint64_t tile_full[kSlots], tile_empty[kSlots];
  BackwardWorkTile<Config> work_tiles[kSlots];  // heads: or kNoMoreTiles

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kGroups * kWarpgroupWarps;
    init_barriers(k_full, 1);
    init_barriers(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(do_full, 1);
    init_barriers(ds_full, kConsumers);
    init_barriers(ds_empty, kWarpgroupWarps);
    init_barriers(tile_full, 1);
    init_barriers(tile_empty, kConsumers + kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

/// Shared memory of the kernel for head dims above kMaxNarrowHeadDim.
template <class Config>
struct BackwardWideStorage : BackwardStagedTerms<Config> {
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
    init_barrier(ds_empty, kWarpgroupWarps * Config::kGroups);
    ptx::mbarrier_init_fence();
  }
};

/// Named barriers of the consumers, after what the last arrival means. 0 is __syncthreads().
template <class Config>
struct BackwardBarriers {
  enum Id : int {
    kRowsSanitised = 1,                            // Q and dO of a stage, by all warpgroups
    kKeysSanitised = 2,                            // K: one for each warpgroup
    kKeptDrawn = kKeysSanitised + Config::kGroups  // words of kept weights: one for each warpgroup
  };
};

}  // namespace flash_ext::sm90
