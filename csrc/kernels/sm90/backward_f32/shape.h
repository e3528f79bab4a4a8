// Tiles and registers of the float32 backward, which the plan reads too.
#pragma once

#include <algorithm>

#include "kernels/sm90/common/backward/shape.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

constexpr int kBackwardF32BlockM = 64;              // queries of a tile
constexpr int kBackwardF32BlockN = kWarpgroupRows;  // keys of a CTA: one warpgroup has their dV, another one their dK

/// The head dim of the kernel that serves q and k of head_dim and v of head_dim_v.
constexpr int backward_f32_head_dim(int64_t head_dim, int64_t head_dim_v) {
  return backward_head_dim(head_dim, head_dim_v);
}

/// How many CTAs of a cluster divide the columns.
constexpr int backward_f32_ctas_of_cluster(int head_dim) { return head_dim > 128 ? 2 : 1; }

}  // namespace flash_ext::sm90
