// Tiles of the CPU kernels. A query tile has as many rows as the kernels hold, so that a key tile is loaded for many of
// them, or fewer rows where there would be too few tiles for the threads.
#pragma once

#include "draft.h"
#include "kernels/cpu/tile_sizes.h"

namespace flash_ext::plan {

constexpr int64_t kCpuBlockN = cpu::kBlockN;
constexpr int64_t kCpuMaxBlockM = cpu::kMaxTileRows;

void choose_cpu_forward_tiles(Draft& draft);
void choose_cpu_backward_tiles(Draft& draft);

}  // namespace flash_ext::plan
