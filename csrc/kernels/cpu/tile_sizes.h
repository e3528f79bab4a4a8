// Tile sizes that the kernels are written for and the plan builds on.
#pragma once

#include <cstdint>

namespace flash_ext::cpu {

constexpr int64_t kMaxTileRows = 256;
constexpr int64_t kBlockN = 64;  // keys per tile: a K or V tile of head_dim 64 and a panel of scores fit the L1 cache

}  // namespace flash_ext::cpu
