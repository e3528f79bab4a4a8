// What the warps of a CTA of the bias gradient share: its work tiles, the score tiles under way, and the barriers.
#pragma once

#include <cstdint>

#include "kernels/common/bias_gradient/tiles.cuh"
#include "kernels/common/ring.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/sm90/common/barriers.h"
#include "kernels/sm90/common/matrix_descriptor.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

template <class Element_, int kHeadDim_>
struct BiasConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kGroups = 2;
  static constexpr int kRows = kGroups * kWarpgroupRows, kKeys = 128;
  static constexpr int kSlabs = panels(kHeadDim);  // of S, and of dP
  static constexpr int kStages = 4, kSlots = 4, kFinders = 3;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kRegisters = 240, kProducerRegisters = 24;
  static constexpr int kRowBytes = panel_bytes(kRows), kKeyBytes = panel_bytes(kKeys);  // of a slab
  static constexpr int kStageBytes = kRowBytes + kKeyBytes;
  static constexpr int kSlabsBytes = kStages * kStageBytes;
  static constexpr int kWarps = kGroups * kWarpgroupWarps;  // that compute
  using Bias = BiasTile<16, kKeys>;                         // of a warp
  // Products of S are still under way when those of dP are issued, if all their slabs fit.
  static constexpr bool kOverlap = 2 * kSlabs <= kStages;

  static_assert(kSlabs <= kStages, "a product releases its slabs when it has all of them");
  static_assert(kGroups * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
  // A finder waits for a slot by the parity of its use, every kFinders steps: its step before showed that
  // the slot's last use but one is over.
  static_assert(kFinders <= kSlots, "a finder may miss a use of a slot, and its parity repeats");
};

/// Named barriers. 0 is __syncthreads().
enum BiasBarrier : int {
  kColumnSums = 1,  // of all consumer warps: sums of keys are in shared memory, and then have been read
};

/// A score tile as this CTA sees it.
struct BiasStep {
  bool ends_work_tiles;  // and is no score tile
  bool all_visible;      // every pair of the tile is there and visible
  int batch, head;
  int first_query, first_key;
  int q_row, k_row, q_batch, k_batch, head_kv;  // where its rows lie
};

/// How work tiles are made of tiles.
struct BiasWorkTiles {
  BiasTiles tiles;
  float* shares;  // of chunks, float; each like dbias, without what is between its rows
  int buffers;    // of the bias
  int count;      // of work tiles

  __device__ __forceinline__ DbiasTile tile(int work_tile) const {
    return {work_tile % static_cast<int>(tiles.count()), tiles.key_tiles, tiles.query_tiles, tiles.heads};
  }
  __device__ __forceinline__ int chunk(int work_tile) const { return work_tile / static_cast<int>(tiles.count()); }
};

/// Lies behind the slabs in shared memory.
template <class Config>
struct BiasStorage {
  static constexpr int kStages = Config::kStages, kSlots = Config::kSlots;

  uint64_t slab_full[kStages], slab_empty[kStages];
  uint64_t step_full[kSlots], step_empty[kSlots];
  BiasStep steps[kSlots];
  float lse[kSlots][Config::kRows];  // -inf for rows that are not there or see nothing
  float delta[kSlots][Config::kRows];
  float columns[Config::kWarps][Config::kKeys];  // sums of each warp's rows
  __align__(8) unsigned char score_tiles[Config::kFinders][sizeof(ScoreTiles)];

  static constexpr int bytes() { return (sizeof(BiasStorage) + 127) / 128 * 128; }

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    init_barriers(slab_full, 1);
    init_barriers(slab_empty, Config::kWarps);
    init_barriers(step_full, 1);
    init_barriers(step_empty, Config::kWarps + 1);
    ptx::mbarrier_init_fence();
  }
};

}  // namespace flash_ext::sm90
