// Which slab of columns of which tile a CTA computes.
#pragma once

#include "kernels/common/scheduler/tile_numbers.cuh"

namespace flash_ext::sm80 {

/// The slab, tile, head and batch entry of a CTA; CTAs of one tile lie side by side.
struct SlabIndex {
  int slab, tile, head, batch;

  __device__ __forceinline__ SlabIndex(int slabs, int tiles, int heads)
      : slab(blockIdx.x % slabs),
        tile(blockIdx.x / slabs % tiles),
        head(blockIdx.x / slabs / tiles % heads),
        batch(blockIdx.x / slabs / tiles / heads) {}

  /// Finds the tile by its number. Called by whole warps.
  __device__ __forceinline__ SlabIndex(const AttentionParams& p, const TileNumbers& numbers, int slabs)
      : slab(blockIdx.x % slabs) {
    const unsigned n = blockIdx.x / slabs, count = static_cast<unsigned>(numbers.count);
    head = static_cast<int>(n / count);
    numbers.find(p, n % count, batch, tile);
  }
};

}  // namespace flash_ext::sm80
