// What the warps of a CTA share in shared memory: the metadata of work tiles, and the barriers.
#pragma once

#include "kernels/common/barriers.h"
#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/common/scheduler/work_tile_queue.cuh"
#include "key_tiles.cuh"
#include "visible_tiles.cuh"
#include "work_tile.cuh"

namespace flash_ext::sm90 {

/// Named barriers. 0 is __syncthreads(). Consumer warpgroups are counted from 0.
enum ForwardBarrier : int {
  // Of one consumer warpgroup: for its votes; so that rows of Q are zeroed before they are multiplied; and so that out
  // is written before Inf and NaN are added to it.
  kWarpgroup0 = 1,
  kWarpgroup1 = 2,
  kWarpgroup2 = 3,
  kWarpgroup3 = 4,
  // A producer warp starts: shared memory is initialised.
  kWarp1Started = 9,
  kWarp2Started = 10,
  kWarp3Started = 11,
  // A consumer warpgroup starts: likewise.
  kWarpgroup0Started = 12,
  kWarpgroup1Started = 13,
  kWarpgroup2Started = 14,
  kWarpgroup3Started = 15,
};

__device__ __forceinline__ int barrier_of_warpgroup(int warpgroup) { return kWarpgroup0 + warpgroup; }
__device__ __forceinline__ int warp_started(int warp) { return kWarp1Started + (warp - 1); }
__device__ __forceinline__ int warpgroup_started(int warpgroup) { return kWarpgroup0Started + warpgroup; }

/// Where warp 1 stores out of a work tile. `groups` has a bit for each warpgroup that arrives at out_full.
struct OutTiles {
  bool exists;
  uint32_t groups;
  uint32_t query_slots;  // bit g: the slot of Q of warpgroup g, and of its out
  int first_row, head, batch;
  int k_stage, v_stage;  // kOutInRings: the stages that out goes through
};

/// The shared memory after the tiles. A barrier's name says what the end of its phase means.
template <class Config>
struct ForwardStorage {
  using WorkTile = ForwardWorkTile<Config>;
  static constexpr int kKeyStages = Config::kKeyStages, kValueStages = Config::kValueStages;
  static constexpr int kSlots = Config::kSlots, kWarpgroups = Config::kWarpgroups;
  static constexpr int kQueryTiles = Config::kQuerySlots * kWarpgroups;  // of Q; those of one slot lie side by side

  uint64_t q_full[kQueryTiles];
  uint64_t out_full[kQueryTiles];
  uint64_t q_empty[kWarpgroups];  // only with one slot of Q; with two, warp 1 knows when out has left a slot
  uint64_t k_full[kKeyStages], k_empty[kKeyStages];
  uint64_t v_full[kValueStages], v_empty[kValueStages];
  uint64_t v_raw[kValueStages];  // V has arrived but must be sanitised; v_full follows when that is done
  // kOutInRings: the TMA store has read out from this stage. One for each stage, because two uses may follow each
  // other, and a waiter must see each phase before the next one ends.
  uint64_t out_left_keys[kKeyStages], out_left_values[kValueStages];
  uint64_t work_tile_full[kSlots], work_tile_empty[kSlots];
  uint64_t work_tile_loaded;          // few tiles of its K are left to load
  OutTiles out;                       // for warp 1, which stores it
  uint32_t out_is_here[kQueryTiles];  // with out_full: out is in shared memory, not written from registers
  int has_work_tile[kSlots];
  __align__(8) unsigned char work_tile[kSlots][sizeof(ForwardWorkTile<Config>)];

  __device__ __forceinline__ ForwardWorkTile<Config>& work_tile_in(int slot) {
    return *reinterpret_cast<ForwardWorkTile<Config>*>(work_tile[slot]);
  }

  /// Initialises the barriers. One thread calls it, whose addresses are constants; if lanes shared the barriers, they
  /// would run one after the other.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = kWarpgroups * kWarpgroupWarps, kLoaders = 3;
    init_barriers(q_full, 1);
    init_barriers(q_empty, kWarpgroupWarps);
    init_barriers(out_full, kWarpgroupThreads);
    init_barriers(k_full, 1);
    init_barriers(k_empty, kConsumers);
    init_barriers(v_full, 1);
    init_barriers(v_empty, kConsumers + 1);
    init_barriers(v_raw, 1);
    init_barriers(out_left_keys, 1);
    init_barriers(out_left_values, 1);
    init_barrier(work_tile_loaded, 1);
    init_barriers(work_tile_full, 1);
    init_barriers(work_tile_empty, kConsumers + kLoaders);
    ptx::mbarrier_init_fence();
  }
};

/// The storage with a block mask, which also says which key tile lies in each stage.
template <class Config>
struct ForwardListedStorage : ForwardStorage<Config> {
  ListedKeys listed_keys[Config::kKeyStages];  // published with k_full
};

/// The storage of the variants with bias, masks or dropout. A part of a bias has 64 queries and 64 keys.
template <class Config>
struct ForwardVisibleStorage : ForwardStorage<Config> {
  uint64_t bias_full[Config::kWarpgroups][Config::kBiasSlots], bias_empty[Config::kWarpgroups][Config::kBiasSlots];
  TileMetadata k_metadata[Config::kKeyStages];                                  // published with k_full
  KeyRandomBits key_random_bits[Config::kKeyStages][Config::kRandomKeyGroups];  // published with k_full

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    for (int g = 0; g < Config::kWarpgroups; ++g)
      for (int k = 0; k < Config::kBiasSlots; ++k) {
        init_barrier(bias_full[g][k], 1);
        init_barrier(bias_empty[g][k], kWarpgroupWarps);
      }
    ForwardStorage<Config>::init();
  }
};

template <class Config>
using ForwardStorageOf =
    std::conditional_t<Config::kVisible, ForwardVisibleStorage<Config>,
                       std::conditional_t<Config::kListsBlocks, ForwardListedStorage<Config>, ForwardStorage<Config>>>;

}  // namespace flash_ext::sm90
