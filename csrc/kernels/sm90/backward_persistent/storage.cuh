// What the warps of a CTA share, after the tiles in shared memory: row terms, barriers, and work
// tiles. A barrier's name says what the end of its phase means.
#pragma once

#include <cstdint>
#include <type_traits>

#include "config.cuh"
#include "kernels/common/backward/dq_zeroing.cuh"
#include "kernels/sm90/common/backward/option_parts.cuh"
#include "kernels/sm90/common/backward/storage.cuh"

namespace flash_ext::sm90 {

constexpr int kNoMoreTiles = -1;

/// What zeroing dQ needs for the key tiles in shared memory. It stands after the work tiles: among fields of
/// BackwardWorkTile it made ptxas reorder the consumers' instructions, and long sequences 2 to 4 % slower.
template <bool kZeroesDq, int kSlots>
struct WorkTileShares {};
template <int kSlots>
struct WorkTileShares<true, kSlots> {
  DqShare shares[kSlots];     // what the CTA zeroes with a tile: a share of a later one
  bool dq_is_zeroed[kSlots];  // whether the sums that the tile's steps add to were found zeroed
};

/// Like BackwardPipelinedStorage, with K, V and work tiles of two key tiles.
template <class Config>
struct BackwardPersistentStorage : BackwardStagedTerms<Config> {
  static constexpr int kSlots = Config::kKeySlots;

  uint64_t k_full[kSlots], v_full[kSlots];
  uint64_t q_full[Config::kStages];   // with lse
  uint64_t do_full[Config::kStages];  // with minus_delta
  uint64_t ds_full[Config::kDsStages], ds_empty[Config::kDsStages];
  uint64_t tile_full[kSlots], tile_empty[kSlots];
  BackwardWorkTile<Config> work_tiles[kSlots];  // heads: or kNoMoreTiles
  WorkTileShares<Config::kZeroesDq, kSlots> zeroing;

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kWarpgroups * kWarpgroupWarps;
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
  __device__ __forceinline__ void prepare(const BackwardParams&) {}
};

/// The same with an option.
template <class Config>
struct BackwardPersistentOptionsStorage : BackwardPersistentStorage<Config>, BackwardVisibleKeys<Config> {
  float cap;  // of scores, to base 2

  /// Called by one thread.
  __device__ __forceinline__ void prepare(const BackwardParams& p) {
    if constexpr (Config::may_have(kStepSoftcapped)) cap = static_cast<float>(p.softcap) * kLog2E;
  }
};

template <class Config>
using BackwardPersistentStorageOf = std::conditional_t<Config::kHasOptions, BackwardPersistentOptionsStorage<Config>,
                                                       BackwardPersistentStorage<Config>>;

}  // namespace flash_ext::sm90
