// The shared memory of a CTA of the float32 backward, after the subtiles.
#pragma once

#include "config.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

/// Barriers of the halves of S and dP that the CTAs of a cluster exchange: none for one CTA.
template <int kCluster>
struct BackwardF32Exchange {
  __device__ __forceinline__ void init() {}
};

template <>
struct BackwardF32Exchange<2> {
  uint64_t s_half_full[kWarpgroupWarps], dp_half_full[kWarpgroupWarps];  // of a warp's halves here
  uint64_t other_empty;                                                  // the slots for halves in the other CTA

  __device__ __forceinline__ void init() {
    init_barriers(s_half_full, 1);
    init_barriers(dp_half_full, 1);
    init_barrier(other_empty, kWarpgroupWarps);
  }
};

/// After the subtiles in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct BackwardF32Storage : BackwardF32Exchange<Config::kCluster> {
  static constexpr int kQuerySlots = Config::kQuerySlots, kDsSlots = Config::kDsSlots;
  using WorkTile = BackwardWorkTile<Config>;

  __align__(16) float lse[Config::kTiles][Config::kBlockM];  // brought by copies of 16 bytes
  float minus_delta[Config::kTiles][Config::kBlockM];
  uint64_t q_full[kQuerySlots], q_empty[kQuerySlots];  // the first panel's: with lse and minus_delta
  uint64_t do_full[kQuerySlots], do_empty[kQuerySlots];
  uint64_t p_full[kDsSlots], ds_full[kDsSlots], ds_empty[kDsSlots];
  WorkTile work_tile;

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    init_barriers(q_full, 1);
    init_barriers(q_empty, kWarpgroupWarps);
    init_barriers(do_full, 1);
    init_barriers(do_empty, 2 * kWarpgroupWarps);
    init_barriers(p_full, kWarpgroupWarps);
    init_barriers(ds_full, kWarpgroupWarps);
    init_barriers(ds_empty, kWarpgroupWarps);
    BackwardF32Exchange<Config::kCluster>::init();
    ptx::mbarrier_init_fence();
  }
};

/// Barriers of one warpgroup each. 0 is __syncthreads().
enum BackwardF32Barrier : int { kValuesBarrier = 1, kGradientsBarrier = 2 };

}  // namespace flash_ext::sm90
