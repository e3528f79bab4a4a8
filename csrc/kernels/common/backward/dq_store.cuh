// dQ, which many CTAs sum in float. The sums lie in the order of the accumulators of the warps that add to them, so
// that a warp adds one contiguous slice. A kernel at the end converts them to rows.
#pragma once

#include <numeric>

#include "dq_completion.cuh"
#include "eight_of_row.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/flag.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/reduction.h"
#include "row_terms.cuh"
#include "workspace.h"

namespace flash_ext {

/// A tile of kBlockM x kHeadDim is divided among kWarps warps; each has 32 rows and kColumns columns of it.
template <int kBlockM, int kHeadDim, int kWarps>
struct DqLayout {
  static constexpr bool kTransposed = false;
  static constexpr int kRowGroups = kBlockM / 32;
  static constexpr int kColumns = kHeadDim * kRowGroups / kWarps;
  static constexpr int kM = 2, kN = kColumns / 8;  // accumulators of a warp
  static constexpr int kWarpElements = 32 * kColumns;
  static_assert(kBlockM % 32 == 0 && kWarps % kRowGroups == 0 && kColumns % 16 == 0, "warps own whole tiles of 16");

  __device__ __forceinline__ static int first_row(int warp) { return warp % kRowGroups * 32; }
  __device__ __forceinline__ static int first_column(int warp) { return warp / kRowGroups * kColumns; }
  __device__ __forceinline__ static int fragment(int warp, int m, int n) {
    return warp * kWarpElements + (m * kN + n) * 128;
  }

  /// Adds the accumulators of a warp.
  template <int kTiles>
  __device__ __forceinline__ static void add(float* g_tile, const float (&c)[kM][kTiles][4], int warp, int lane) {
#if __CUDA_ARCH__ >= 900
    float* const g_lane = g_tile + fragment(warp, 0, 0) + 4 * lane;
#else
    float* const g_lane = g_tile + fragment(warp, 0, 0) + lane;
#endif
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#if __CUDA_ARCH__ >= 900
        ptx::reduce_add_4(g_lane + fragment(0, m, n), c[m][n]);
#else
#pragma unroll
        for (int e = 0; e < 4; ++e) ptx::reduce_add(g_lane + fragment(0, m, n) + 32 * e, c[m][n][e]);
#endif
      }
  }

  /// Loads to x[t] the elements of lane 4 g + t, t = 0..3: element e is of row g (e < 2) or g + 8, column 2 t + e % 2.
  __device__ __forceinline__ static void load_four_lanes(const float* g_fragment, int g, float (&x)[4][4]) {
    const float4* const float4s = reinterpret_cast<const float4*>(g_fragment);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#if __CUDA_ARCH__ >= 900
      const float4 lane = float4s[4 * g + k];
      x[k][0] = lane.x, x[k][1] = lane.y, x[k][2] = lane.z, x[k][3] = lane.w;
#else
      const float4 element = float4s[8 * k + g];
      x[0][k] = element.x, x[1][k] = element.y, x[2][k] = element.z, x[3][k] = element.w;
#endif
    }
  }
};

constexpr int kStoreDqThreads = 256;
constexpr int kStoreDqCtas = 4;  // of an SM at least: with 40 registers, ptxas' own choice, sm_80 spills

/// Stores dQ of a tile of rows of a head: the sums times softmax_scale, and times keep_scale, by which the workspace's
/// sums are divided.
template <class Element, class Layout, int kBlockM, int kHeadDim>
__device__ __forceinline__ void store_dq(const BackwardParams& p, const BackwardWorkspace& workspace,
                                         const volatile RowTileOfCta& cta, int head) {
  const Sequence sequence(p, cta.batch, head);
  const int first = cta.tile * kBlockM;
  if (cta.tile < 0 || first >= sequence.seqlen_q) return;
  const auto rows = query_rows<Element>(p.dq, sequence);
  const int64_t tile = workspace.tile_index(p, cta.batch, head, sequence.q_begin, cta.tile, kBlockM);
  const float* const g_tile = workspace.dq + tile * kBlockM * kHeadDim;
  const float scale = static_cast<float>(p.softmax_scale) * workspace.keep_scale;
#pragma unroll 2
  for (int flat = threadIdx.x; flat < kBlockM * kHeadDim / 16; flat += kStoreDqThreads) {
    if constexpr (Layout::kTransposed) {
      const typename Layout::FragmentPart part(flat);
      const int i = first + part.row;
      if (part.column >= p.head_dim || i >= sequence.seqlen_q) continue;
      float x[4][4];
      part.load(workspace, tile * kBlockM, head, x);
      store_eight_of_row(rows.row(i) + part.column, x, 0, scale);
      if (i + 1 < sequence.seqlen_q) store_eight_of_row(rows.row(i + 1) + part.column, x, 2, scale);
    } else {
      // Lanes have kAcross fragments beside each other, then rows, then the next fragments: so a load and a store touch
      // few lines each.
      constexpr int kAcross = std::gcd(Layout::kN, 16), kGroups = Layout::kN / kAcross;
      const int n = flat / (8 * kAcross) % kGroups * kAcross + flat % kAcross, g = flat / kAcross % 8;
      const int m = flat / Layout::kN / 8 % Layout::kM, warp = flat / Layout::kN / 8 / Layout::kM;
      const int i = first + Layout::first_row(warp) + 16 * m + g;
      const int column = Layout::first_column(warp) + 8 * n;
      if (column >= p.head_dim || i >= sequence.seqlen_q) continue;
      float x[4][4];
      Layout::load_four_lanes(g_tile + Layout::fragment(warp, m, n), g, x);
      store_eight_of_row(rows.row(i) + column, x, 0, scale);
      if (i + 8 < sequence.seqlen_q) store_eight_of_row(rows.row(i + 8) + column, x, 2, scale);
    }
  }
}

template <class Element, class Layout, int kBlockM, int kHeadDim>
__global__ void __launch_bounds__(kStoreDqThreads, kStoreDqCtas)
    store_dq_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace workspace) {
  const bool waits_for_heads = DqCompletion::is_awaited(workspace);
  if (!waits_for_heads) ptx::wait_for_previous_grid();
  const volatile RowTileOfCta& cta = RowTileOfCta::find(p, workspace.row_tiles);
#pragma unroll 1
  for (int head = cta.first_head; head < cta.end_head; ++head) {
    if (waits_for_heads) DqCompletion::wait(p, workspace, Sequence(p, cta.batch, head));
    store_dq<Element, Layout, kBlockM, kHeadDim>(p, workspace, cta, head);
  }
  // The next kernel waits for this one alone, so this one must not end before the main kernel.
  if (waits_for_heads && blockIdx.x + 1 == gridDim.x) ptx::wait_for_previous_grid();
}

}  // namespace flash_ext
