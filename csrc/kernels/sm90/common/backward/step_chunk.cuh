// A chunk of 32 query tiles of a head, one per lane, of which a mask leaves some: what BackwardStepFinder and
// BackwardOptionsSteps share.
#pragma once

#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// The bits of a chunk's tiles, and the loads that the lane has issued for the chunk after it.
template <class Config>
class BackwardStepChunk {
 protected:
  __device__ __forceinline__ BackwardStepChunk(const BackwardWorkspace& workspace,
                                               const BackwardWorkTile<Config>& work_tile, int lane)
      : workspace_(workspace), work_tile_(work_tile), lane_(lane), chunk_(work_tile.first_step()) {}

  /// Takes the next tile that is left of the chunk; there must be one. Returns its bit.
  __device__ __forceinline__ uint32_t take_bit() {
    const uint32_t bit = left_ & -left_;
    left_ ^= bit;
    return bit;
  }
  __device__ __forceinline__ int tile_of(uint32_t bit) const { return chunk_.tile + __ffs(static_cast<int>(bit)) - 1; }

  __device__ __forceinline__ bool is_past(const BackwardStep& chunk) const { return chunk.head >= work_tile_.heads; }
  __device__ __forceinline__ BackwardStep after(BackwardStep chunk) const {
    chunk.tile += 32;
    if (chunk.tile < work_tile_.tiles.end) return chunk;
    return {chunk.head + 1, work_tile_.tiles.begin};
  }
  /// Whether the lane has a tile of the chunk to load. Until its state is loaded, the tile counts as hidden.
  __device__ __forceinline__ bool begin_load(const BackwardStep& chunk) {
    next_state_ = kTileHidden;
    return !is_past(chunk) && chunk.tile + lane_ < work_tile_.tiles.end;
  }
  /// Issues the load of whether Q or dO of the lane's tile may hold Inf or NaN.
  __device__ __forceinline__ void load_non_finite(const BackwardStep& chunk) {
    next_has_non_finite_ =
        workspace_
            .has_non_finite[work_tile_.workspace_tile + chunk.head * workspace_.tiles_per_head + chunk.tile + lane_];
  }
  /// Sets the chunk's bits by what was loaded.
  __device__ __forceinline__ void take_loaded() {
    left_ = __ballot_sync(~0u, next_state_ != kTileHidden);
    masked_ = __ballot_sync(~0u, next_state_ == kTileMasked);
    has_non_finite_ = __ballot_sync(~0u, next_has_non_finite_ != 0);
  }

  const BackwardWorkspace& workspace_;
  const BackwardWorkTile<Config>& work_tile_;
  const int lane_;
  BackwardStep chunk_;                                   // its first tile
  uint32_t left_ = 0, masked_ = 0, has_non_finite_ = 0;  // bits of its tiles
  int next_state_ = 0, next_has_non_finite_ = 0;         // of the lane's tile in the chunk after it
};

}  // namespace flash_ext::sm90
