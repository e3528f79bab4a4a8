// What the warps of a CTA of the float32 forward share: its work tiles, and the barriers.
#pragma once

#include "config.h"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_address.h"

namespace flash_ext::sm90 {

/// A tile of queries of one head, and the tiles of keys that it sees.
template <class Config>
struct ForwardF32WorkTile {
  Sequence sequence;
  int first_query, end_query;
  TileSpan tiles;                      // of all rows: these are loaded
  TileSpan rows[Config::kWarpgroups];  // of the rows of each warpgroup, within `tiles`
  bool met_non_finite;                 // in V of a tile that not all rows see in full; written before its `full`

  /// The partial tile stands first, where a causal mask leaves the fewest keys.
  __device__ __forceinline__ ForwardF32WorkTile(const Sequence& sequence, int num_tiles, int tile)
      : sequence(sequence),
        end_query(sequence.seqlen_q - (num_tiles - 1 - tile) * Config::kBlockM),
        met_non_finite(false) {
    first_query = max(end_query - Config::kBlockM, 0);
    tiles = span(first_query, end_query);
    for (int g = 0; g < Config::kWarpgroups; ++g) {
      const int first = first_query + g * kWarpgroupRows;
      rows[g] = span(first, min(first + kWarpgroupRows, end_query));
      if (rows[g].begin == rows[g].end) rows[g].begin = rows[g].end = tiles.begin;
    }
  }

 private:
  __device__ __forceinline__ TileSpan span(int first, int end) const {
    return sequence.template key_tiles<Config::kBlockN>(first, end);
  }
};

/// Named barriers, one for each consumer warpgroup. 0 is __syncthreads().
struct ForwardF32Barriers {
  enum Id : int { kWarpgroup1 = 1, kWarpgroup2 = 2, kWarpgroup3 = 3 };

  /// `warpgroup`: its number in the CTA, from 1 on, because warpgroup 0 is the producers.
  __device__ __forceinline__ static int of_warpgroup(int warpgroup) { return kWarpgroup1 + (warpgroup - 1); }
};

/// The shared memory after the subtiles. A barrier's name says what the end of its phase means.
template <class Config>
struct ForwardF32Storage {
  static constexpr int kSlots = 2;
  using WorkTile = ForwardF32WorkTile<Config>;

  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t work_tile_full[kSlots], work_tile_empty[kSlots];
  int has_work_tile[kSlots];
  int64_t position;  // of the next work tile in the schedule
  __align__(8) unsigned char work_tile[kSlots][sizeof(WorkTile)];

  __device__ __forceinline__ WorkTile& work_tile_in(int slot) { return *reinterpret_cast<WorkTile*>(work_tile[slot]); }

  /// Called by one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kWarpgroups * kWarpgroupWarps;
    position = blockIdx.x;
    for (int k = 0; k < Config::kStages; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&full[k]), kWarpgroupWarps);
      ptx::mbarrier_init(ptx::shared_address(&empty[k]), kConsumers);
    }
    for (int k = 0; k < kSlots; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&work_tile_full[k]), 1);
      ptx::mbarrier_init(ptx::shared_address(&work_tile_empty[k]), kConsumers + kWarpgroupWarps);
    }
  }
};

}  // namespace flash_ext::sm90
