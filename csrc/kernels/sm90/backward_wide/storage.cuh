// What the warps of a CTA share, behind the tiles in shared memory: row terms, barriers, and the work tile. A barrier's
// name says what the end of its phase means.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

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
    init_barrier(ds_empty, kWarpgroupWarps * Config::kCluster);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
