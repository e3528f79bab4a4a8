// The tensor maps of the backward's kernels.
#pragma once

#include "kernels/ptx/tensor_map.h"

namespace flash_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, grad_out;
};
struct BackwardBiasMaps : BackwardMaps {
  CUtensorMap bias;
};
/// For stores of a warp's rows, and of one row, where a sequence ends among these.
struct BackwardRowMaps {
  CUtensorMap all, one;
};
/// Of kernels whose dK and dV leave by TMA.
struct BackwardStoringMaps : BackwardMaps {
  BackwardRowMaps dk, dv;
};
struct BackwardStoringBiasMaps : BackwardStoringMaps {
  CUtensorMap bias;
};

}  // namespace flash_ext::sm90
