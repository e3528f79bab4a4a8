// The order of sums of dQ in memory: that of accumulators.
#pragma once

namespace flash_ext::sm90 {

/// dQ of a tile while it is summed up in memory: in the order of the accumulators of the warps that compute it.
template <int kHeadDim>
struct BackwardDqLayout {
  static constexpr bool kTransposed = false;
  static constexpr int kM = 1, kN = kHeadDim / 8;
  __device__ __forceinline__ static int first_row(int warp) { return warp * 16; }
  __device__ __forceinline__ static int first_column(int) { return 0; }
  __device__ __forceinline__ static int fragment(int warp, int, int n) { return (warp * kN + n) * 128; }
  /// Element e of the lanes 4 g + t, for t = 0..3: rows g (e < 2) and g + 8, columns 2 t + e % 2.
  __device__ __forceinline__ static void load_four_lanes(const float* g_fragment, int g, float (&x)[4][4]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 lane = reinterpret_cast<const float4*>(g_fragment)[4 * g + t];
      x[t][0] = lane.x, x[t][1] = lane.y, x[t][2] = lane.z, x[t][3] = lane.w;
    }
  }
};

}  // namespace flash_ext::sm90
