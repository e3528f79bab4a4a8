// The order of sums of dQ^T in memory: that of accumulators.
#pragma once

#include "kernels/common/backward/workspace.h"

namespace flash_ext::sm90 {

/// dQ^T of a tile while it is summed up in memory: a warp adds to a plane of 16 columns
/// (BackwardWorkspace::dq_of_plane), in fragments of eight queries, four floats of each lane. With g = lane / 4 and t =
/// lane % 4, element e is of column g (e < 2) or g + 8, and of query 2 t + e % 2.
template <int kBlockM, int kHeadDim>
struct BackwardTransposedDqLayout {
  static constexpr bool kTransposed = true;
  static constexpr int kPlanes = kHeadDim / kDqPlaneColumns;

  /// Eight columns of two consecutive queries. Parts of the same queries follow each other.
  struct FragmentPart {
    int row, column;

    __device__ __forceinline__ explicit FragmentPart(int flat) : row(flat / 8 * 2), column(flat % 8 * 8) {}

    /// Loads the part as four lanes hold two rows of accumulators. `first_term`: the term of the tile's first query.
    __device__ __forceinline__ void load(const BackwardWorkspace& workspace, int64_t first_term, int head,
                                         float (&x)[4][4]) const {
      const int64_t fragment =
          workspace.dq_of_plane(first_term + row / 8 * 8, head, column / kDqPlaneColumns, kPlanes, kBlockM);
      const float* const g_first = workspace.dq + fragment + row % 8 / 2 * 4 + column % kDqPlaneColumns / 8 * 2;
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        const float2 pair = *reinterpret_cast<const float2*>(g_first + 16 * g);
        x[g / 2][g % 2] = pair.x, x[g / 2][2 + g % 2] = pair.y;
      }
    }
  };
};

}  // namespace flash_ext::sm90
