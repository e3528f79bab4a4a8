// Tiles and registers of the float32 backward, which the plan reads too.
#pragma once

#include "forward_shape.h"

namespace flash_ext::sm90 {

constexpr int kMostBackwardF32BlockHeadDim = 128;  // above, two blocks of a cluster have half of the columns each
constexpr int kBackwardF32BlockM = 64;          // queries of a tile
constexpr int kBackwardF32BlockN = kGroupRows;  // keys of a block: one warpgroup has their dV, another one their dK

}  // namespace flash_ext::sm90
