// Tiles of the CPU kernels. Rows: as many as they hold, so that a tile of keys is loaded for many of them, or fewer
// where that makes too few tiles.
#pragma once

#include "draft.h"
#include "kernels/cpu/tile_sizes.h"

namespace flash_ext::plan {

constexpr int64_t kCpuBlockN = cpu::kBlockN;
constexpr int64_t kCpuMaxBlockM = cpu::kMaxTileRows;

void choose_cpu_forward_tiles(Draft& draft);
void choose_cpu_backward_tiles(Draft& draft);

}  // namespace flash_ext::plan
