// What the warps of a CTA share, after the tiles in shared memory: row terms, barriers, and the work tile. A barrier's
// name says what the end of its phase means.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

/// Shared memory of the pipelined loop. Row terms are permuted (row_terms.cuh). No barrier says that a stage of Q or
/// dO is free: when dS of a step is complete, the stages of the step before are free.
template <class Config>
struct BackwardPipelinedStorage : BackwardStagedTerms<Config> {
  uint64_t k_full, v_full;
  uint64_t q_full[Config::kStages];   // with lse
  uint64_t do_full[Config::kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  BackwardWorkTile<Config> work_tile;

  /// For options, which need more than the work tile: the thread that has set it calls prepare(), then all call
  /// read_masks().
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
  __device__ __forceinline__ void read_masks(const BackwardParams&, const BackwardWorkspace&) {}
  /// Called by one thread.
  __device__ __forceinline__ void init() {
    init_barrier(k_full, 1);
    init_barrier(v_full, 1);
    init_barriers(q_full, 1);
    init_barriers(do_full, 1);
    init_barriers(ds_full, Config::kWarpgroups * kWarpgroupWarps);
    init_barriers(ds_empty, kWarpgroupWarps);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
