// dK and dV of key tiles that are split among CTAs. Each CTA stores its sums in float, in the order of its
// accumulators, and a kernel adds them up, always in the same order.
//
// A fragment is a warp's part of 16 keys and 8 columns: four floats of each lane, side by side.
#pragma once

#include "eight_of_row.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "schedule.cuh"

namespace flash_ext {

constexpr int kFragmentElements = 32 * 4;

/// Where a fragment lies in the sums of a key tile; row and column count fragments.
template <int kHeadDim, class Float>
__device__ __forceinline__ Float* sum_fragment(Float* g_sums, int row, int column) {
  return g_sums + (row * (kHeadDim / 8) + column) * kFragmentElements;
}

__device__ __forceinline__ void store_fragment(float* g_fragment, const float (&x)[4], float scale, int lane) {
  reinterpret_cast<float4*>(g_fragment)[lane] = float4{x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale};
}

/// Sums over splits the elements of the lanes 4 g + t of a fragment, t = 0..3, to x[t]: element e is of row g (e < 2)
/// or g + 8, and of column 2 t + e % 2.
__device__ __forceinline__ void sum_splits(float (&x)[4][4], const float* g_fragment, int g, int splits,
                                           int64_t slot_elements) {
#pragma unroll
  for (auto& lane : x) lane[0] = lane[1] = lane[2] = lane[3] = 0.0f;
#pragma unroll 2
  for (int split = 0; split < splits; ++split) {
    const float4* const lanes = reinterpret_cast<const float4*>(g_fragment + split * slot_elements) + 4 * g;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 lane = lanes[t];
      x[t][0] += lane.x, x[t][1] += lane.y, x[t][2] += lane.z, x[t][3] += lane.w;
    }
  }
}

constexpr int kCombineThreads = 256;

/// CTAs of combine_splits_kernel for dK of a key tile; it has as many for dV.
template <int kBlockN, int kHeadDim>
constexpr int combine_ctas() {
  static_assert(kBlockN * kHeadDim % (16 * kCombineThreads) == 0, "a thread has 16 elements");
  return kBlockN * kHeadDim / 16 / kCombineThreads;
}

/// Adds up the splits of key tiles. It is static, as other kernels that one file instantiates for 90a alone and another
/// for all GPUs.
template <class Element, int kBlockM, int kBlockN, int kHeadDim, bool kAnchored>
static __global__ void __launch_bounds__(kCombineThreads)
    combine_splits_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardSchedule schedule) {
  constexpr int kCtas = combine_ctas<kBlockN, kHeadDim>(), kColumns = kHeadDim / 8;
  ptx::launch_dependents();
  ptx::wait_for_previous_grid();
  const uint32_t split_tile = blockIdx.x / (2 * kCtas);
  const bool is_value = blockIdx.x / kCtas % 2 != 0;
  const TensorView& view = is_value ? p.dv : p.dk;
  const BackwardOrder& order = schedule.order;
  const KeyTile<kBlockM, kBlockN, kAnchored> keys(p, order, schedule.tile_at(order.unsplit_tiles + split_tile));
  const int splits = order.splits_of(keys.tiles.end - keys.tiles.begin);
  if (!keys.exists() || splits == 1 || !view.data) return;

  const int flat = static_cast<int>(blockIdx.x) % kCtas * kCombineThreads + static_cast<int>(threadIdx.x);
  const int column = flat % kColumns, g = flat / kColumns % 8, fragment_row = flat / kColumns / 8;
  const int row = keys.first_key + 16 * fragment_row + g, seqlen_k = keys.sequence.seqlen_k;
  if (8 * column >= (is_value ? p.head_dim_v : p.head_dim) || row >= seqlen_k) return;
  const float* const g_sums = schedule.sums + order.splits() * split_tile * schedule.slot_elements +
                              (is_value ? schedule.slot_elements / 2 : 0);
  float x[4][4];
  sum_splits(x, sum_fragment<kHeadDim>(g_sums, fragment_row, column), g, splits, schedule.slot_elements);
  const auto rows = key_rows<Element, false>(p, view, keys.sequence);
  store_eight_of_row(rows.row(row) + 8 * column, x, 0, 1.0f);
  if (row + 8 < seqlen_k) store_eight_of_row(rows.row(row + 8) + 8 * column, x, 2, 1.0f);
}

/// Launches combine_splits_kernel, after the kernel that stores the sums; launches nothing where no tile is split.
/// kAnchored: as in the KeyTile of the kernel that stores the sums.
template <class Element, int kBlockM, int kBlockN, int kHeadDim, bool kAnchored = false>
void combine_splits(const BackwardParams& p, const BackwardSchedule& schedule, bool overlaps_previous,
                    cudaStream_t stream) {
  const int64_t tiles = schedule.order.split_tiles(schedule.tiles);
  const LaunchShape shape{grid_of(tiles * 2 * combine_ctas<kBlockN, kHeadDim>()), dim3(kCombineThreads), 0,
                          overlaps_previous};
  launch("backward splits", combine_splits_kernel<Element, kBlockM, kBlockN, kHeadDim, kAnchored>, shape, stream, p,
         schedule);
}

}  // namespace flash_ext
