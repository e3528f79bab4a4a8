// Tiles, registers and shared memory of the loop without overlap.
#pragma once

#include "kernels/common/backward/turns.cuh"
#include "kernels/sm90/common/backward/config.cuh"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim>
struct BackwardUnpipelinedConfig : BackwardNarrowConfig<Element, kHeadDim, 2> {
  static constexpr TurnTaking kTurns = TurnTaking::kNever;  // sm80/backward has options in turns
};

}  // namespace flash_ext::sm90
