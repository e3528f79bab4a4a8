// A counting sort: a CTA sorts the tiles of a section of heads by their costs, in so many classes.
#include "kernels/common/scheduler/longest_first.h"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"

namespace flash_ext {
namespace {

constexpr int kClasses = 1024, kSortThreads = 1024;

/// Replaces the number of tiles of each class by the number of tiles in all classes before it. All threads call it, one
/// for each class.
__device__ __forceinline__ void sum_before(int (&s_classes)[kClasses]) {
  static_assert(kClasses == kSortThreads);
  __shared__ int s_warps[kSortThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int own = s_classes[threadIdx.x];
  const auto sum_up = [lane](int x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, x, step);
      if (lane >= step) x += before;
    }
    return x;
  };
  const int in_warp = sum_up(own);
  if (lane == 31) s_warps[warp] = in_warp;
  __syncthreads();
  if (warp == 0) s_warps[lane] = sum_up(s_warps[lane]);
  __syncthreads();
  s_classes[threadIdx.x] = in_warp - own + (warp > 0 ? s_warps[warp - 1] : 0);
  __syncthreads();
}

__global__ void __launch_bounds__(kSortThreads)
    longest_first_kernel(const __grid_constant__ LongestFirst order, const __grid_constant__ WorkList list) {
  __shared__ int s_classes[kClasses];  // the first one costs the most
  ptx::launch_dependents();
  s_classes[threadIdx.x] = 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) list.head->taken = 0;
  __syncthreads();
  const int heads = static_cast<int>(order.heads), tiles = static_cast<int>(order.tiles);
  const int first_head = static_cast<int>(blockIdx.x * order.section_heads);
  const int end_head = min(first_head + static_cast<int>(order.section_heads), static_cast<int>(order.batch) * heads);
  const float scale = static_cast<float>(kClasses) / static_cast<float>(order.most + 1);
  const auto class_of = [&](int head, int tile) {
    const int cost = min(max(order.costs.of(head / heads, head % heads, tile), 0), static_cast<int>(order.most));
    return kClasses - 1 - static_cast<int>(static_cast<float>(cost) * scale);
  };
  // Consecutive k are tiles of one head, so that a warp reads costs that lie side by side.
  const int count = (end_head - first_head) * tiles;
  for (int k = threadIdx.x; k < count; k += kSortThreads)
    atomicAdd(&s_classes[class_of(first_head + k / tiles, k % tiles)], 1);
  __syncthreads();
  sum_before(s_classes);
  ListedTile* const g_section = list.entries + int64_t{first_head} * tiles;
  for (int k = threadIdx.x; k < count; k += kSortThreads) {
    const int head = first_head + k / tiles, tile = k % tiles;
    const int rank = atomicAdd(&s_classes[class_of(head, tile)], 1);
    *reinterpret_cast<int4*>(g_section + rank) = make_int4(head / heads, tile, head % heads, tiles);
  }
}

}  // namespace

void list_longest_first(const LongestFirst& order, const WorkList& list, cudaStream_t stream) {
  if (order.positions() == 0) return;
  const int64_t sections = (order.batch * order.heads + order.section_heads - 1) / order.section_heads;
  launch("longest tiles first", longest_first_kernel, {grid_of(sections), dim3(kSortThreads)}, stream, order, list);
}

}  // namespace flash_ext
