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
/// Maps for stores: `all` stores a warp's rows at once, `one` a single row, where a sequence ends among a warp's rows.
struct BackwardRowMaps {
  CUtensorMap all, one;
};
/// Maps of kernels that store dK and dV by TMA.
struct BackwardStoringMaps : BackwardMaps {
  BackwardRowMaps dk, dv;
};
struct BackwardStoringBiasMaps : BackwardStoringMaps {
  CUtensorMap bias;
};

}  // namespace flash_ext::sm90
