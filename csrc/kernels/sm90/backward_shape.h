// Tiles and registers of the backward, in one table that the plan reads too.
#pragma once

#include "forward_shape.h"

namespace flash_ext::sm90 {

constexpr int kMostBackwardHeadDim = 128;
constexpr int kBackwardBlockM = 64;  // queries of a tile

struct BackwardShape {
  int groups;        // warpgroups that compute scores, kGroupRows keys each
  int registers;     // of a thread of theirs
  int dq_registers;  // of the warpgroup that computes dQ and loads
};

constexpr BackwardShape backward_shape(int head_dim) {
  // dK and dV are 128 registers of a thread at head_dim 128, 64 at 64.
  return head_dim == 64 ? BackwardShape{3, 144, 80} : BackwardShape{2, 216, 72};
}

}  // namespace flash_ext::sm90
