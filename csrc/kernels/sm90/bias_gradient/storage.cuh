// What the warps of a CTA of the bias gradient share: its work tiles, the score tiles under way, and the barriers.
#pragma once

#include <cstdint>

#include "config.cuh"
#include "kernels/common/barriers.h"
#include "kernels/common/bias_gradient/tiles.cuh"
#include "kernels/common/ring.cuh"

namespace flash_ext::sm90 {

/// Named barriers. 0 is __syncthreads().
enum BiasBarrier : int {
  kColumnSums = 1,  // of all consumer warps: sums of keys are in shared memory, and then have been read
};

/// A score tile as this CTA sees it.
struct BiasStep {
  bool ends_work_tiles;  // the step marks the end of a work tile and has no score tile
  bool all_visible;      // every pair of the tile exists and is visible
  int batch, head;
  int first_query, first_key;
  int q_row, k_row, q_batch, k_batch, head_kv;  // where its rows lie
};

/// The work tiles: tiles of dbias, or chunks of their sums.
struct BiasWorkTiles {
  BiasTiles tiles;
  float* shares;  // of chunks, in float; each has the elements of dbias without gaps between rows
  int buffers;    // of the bias
  int count;      // of work tiles

  __device__ __forceinline__ DbiasTile tile(int work_tile) const {
    return {work_tile % static_cast<int>(tiles.count()), tiles.key_tiles, tiles.query_tiles, tiles.heads};
  }
  __device__ __forceinline__ int chunk(int work_tile) const { return work_tile / static_cast<int>(tiles.count()); }
};

/// The shared memory after the slabs.
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
