// Constants of an instantiation of the short forward.
#pragma once

#include "kernels/sm90/common/matrix_descriptor.h"
#include "kernels/sm90/common/warpgroup.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// kIndex: which of the shapes for kHeadDim (shape.h).
template <class Element_, int kHeadDim_, int kIndex>
struct ForwardShortConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // of q, k and v
  static constexpr ForwardShortShape kShape = forward_short_shape(kHeadDim, kIndex);
  static constexpr int kWarpgroups = kShape.warpgroups;  // all are consumers
  static constexpr int kBlockM = kWarpgroups * kWarpgroupRows;
  static constexpr int kBlockN = kShape.block_n;
  static constexpr int kStages = kShape.stages;  // of K and of V
  static constexpr int kWarps = kWarpgroups * kWarpgroupWarps;
  static constexpr int kThreads = kWarpgroups * kWarpgroupThreads;
  static constexpr int kCtasPerSm = kShape.ctas_per_sm;

  static constexpr int kPanels = panels(kHeadDim);
  static constexpr int kQueryBytes = tile_bytes(kWarpgroupRows, kHeadDim);  // of a warpgroup; out takes its place
  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kKeysOffset = kWarpgroups * kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kKeyBytes;
  static constexpr int kTilesBytes = kValuesOffset + kStages * kKeyBytes;
};

}  // namespace flash_ext::sm90
