// Tiles and registers of the float32 backward, which the plan reads too.
#pragma once

#include "forward_shape.h"

namespace flash_ext::sm90 {

constexpr int kMostBackwardF32HeadDim = 128;
constexpr int kBackwardF32BlockM = 64;          // queries of a tile
constexpr int kBackwardF32BlockN = kGroupRows;  // keys of a block: one warpgroup has their dV, another one their dK

}  // namespace flash_ext::sm90
