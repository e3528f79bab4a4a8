// Tiles, registers and shared memory of the loop without overlap.
#pragma once

#include "kernels/sm90/common/backward/config.cuh"

namespace flash_ext::sm90 {

/// A kernel that always takes turns is one of its own: a test for turns in the loop would cost the other calls a tenth.
template <class Element, int kHeadDim, TurnTaking kTurns_ = TurnTaking::kNever>
struct BackwardConfig : BackwardNarrowConfig<Element, kHeadDim, 2> {
  static constexpr TurnTaking kTurns = kTurns_;
};

}  // namespace flash_ext::sm90
