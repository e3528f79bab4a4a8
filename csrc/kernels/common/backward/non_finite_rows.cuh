// Tiles of queries whose Q or dO may hold Inf or NaN. The kernel of row terms sets a flag for each; where an option
// hides pairs of such a tile, the main kernel sanitises it.
#pragma once

#include "workspace.h"

namespace flash_ext {

/// Whether one of these query tiles, of any of the heads, has its flag set. Each thread looks at a share of the tiles.
__device__ __forceinline__ bool finds_non_finite(const BackwardWorkspace& workspace, int64_t first_tile, int tiles,
                                                 int heads, int thread, int threads) {
  bool found = false;
#pragma unroll 1
  for (int head = 0; head < heads; ++head)
    for (int tile = thread; tile < tiles; tile += threads)
      found |= workspace.has_non_finite[first_tile + head * workspace.tiles_per_head + tile] != 0;
  return found;
}

}  // namespace flash_ext
