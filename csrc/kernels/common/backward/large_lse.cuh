// Rows whose lse is so large that their weights must be bounded (LargeLse). The kernel of row terms sets a flag for
// each warp of a tile; a CTA of the main kernel reads the flags of its tiles once. If one is set, the CTA treats all
// tiles as partial, where weights are bounded. The step for full tiles thus needs no bound.
#pragma once

#include "workspace.h"

namespace flash_ext {

/// Whether a row of these query tiles, of any of the heads, has a LargeLse. Each thread looks at a share of the tiles.
__device__ __forceinline__ bool finds_large_lse(const BackwardWorkspace& workspace, int64_t first_tile, int tiles,
                                                int heads, int thread, int threads) {
  const auto* const g_flags = reinterpret_cast<const uint64_t*>(workspace.large);
  uint64_t found = 0;
#pragma unroll 1
  for (int head = 0; head < heads; ++head)
#pragma unroll 4
    for (int tile = thread; tile < tiles; tile += threads)
      found |= g_flags[first_tile + head * workspace.tiles_per_head + tile];
  return found != 0;
}

}  // namespace flash_ext
