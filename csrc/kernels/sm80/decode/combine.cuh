// The sum of the splits of decoding:   lse = log(e^sink + sum_s e^lse_s),   out = sum_s e^(lse_s - lse) out_s
//
// A CTA owns a row. Its threads share the columns, four each, and form groups that share the splits: of k groups each
// takes every k-th split. All loads of a thread are independent. The order of the sums depends on the splits of the row
// alone.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

constexpr int kMaxCombineThreads = 512;
constexpr int kCombineColumns = 4;  // of a thread
constexpr int kCombineUnroll = 8;   // splits that a thread reads at once

/// A sum of e^(lse_s - maximum) out_s over some splits.
template <class Unit>
struct CombinedSplits {
  float maximum, sum;
  float4 out;

  /// Adds sums over other splits.
  template <int kCount>
  __device__ __forceinline__ void add(const CombinedSplits (&others)[kCount]) {
    float grown = maximum;
#pragma unroll
    for (int n = 0; n < kCount; ++n) grown = fmaxf(grown, others[n].maximum);
    const float stabiliser = grown == -INFINITY ? 0.0f : grown;
    scale(Unit::exp(maximum - stabiliser));
    maximum = grown;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float factor = Unit::exp(others[n].maximum - stabiliser);
      sum += factor * others[n].sum;  // NaN even if nothing else of the split is
      if (factor == 0.0f) continue;
      const float4& other = others[n].out;
      out = {out.x + factor * other.x, out.y + factor * other.y, out.z + factor * other.z, out.w + factor * other.w};
    }
  }

 private:
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
    out = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};
  }
};

constexpr float4 kNoColumns = {0.0f, 0.0f, 0.0f, 0.0f};

/// Adds up the splits number group, group + groups, ... of a row, by a group of threads.
template <class Unit>
__device__ __forceinline__ CombinedSplits<Unit> combine_splits(const DecodePartials& partials, const DecodeGrid& grid,
                                                               const DecodeTile& tile, int row, int column, int columns,
                                                               int group, int groups) {
  const int num_splits = tile.num_splits();
  CombinedSplits<Unit> total{-INFINITY, 0.0f, kNoColumns};
  for (int first = group; first < num_splits; first += groups * kCombineUnroll) {
    CombinedSplits<Unit> splits[kCombineUnroll];
#pragma unroll
    for (int n = 0; n < kCombineUnroll; ++n) {
      const bool exists = first + n * groups < num_splits;
      const int64_t at = tile.partial_row(grid, tile.first_split + (exists ? first + n * groups : first), row);
      splits[n].maximum = partials.lse[at];
      splits[n].sum = 1.0f;
      splits[n].out = *reinterpret_cast<const float4*>(partials.out + at * columns + column);
      if (!exists) splits[n].maximum = -INFINITY;
    }
    total.add(splits);
  }
  return total;
}

template <class Element>
__device__ __forceinline__ void store_four(Element* target, float4 value, float scale) {
  if constexpr (sizeof(Element) == 4) {
    *reinterpret_cast<float4*>(target) =
        make_float4(value.x * scale, value.y * scale, value.z * scale, value.w * scale);
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(ptx::pack2<Element>(value.x * scale, value.y * scale),
                                                   ptx::pack2<Element>(value.z * scale, value.w * scale));
  }
}

__host__ __device__ __forceinline__ int combine_threads_per_group(int columns) {
  return columns <= 64 ? 16 : columns <= 128 ? 32 : 64;
}

/// The row of a CTA. CTAs are numbered by rows of a group, groups and batch entries or, where tiles are numbered by
/// rows, by heads and rows in memory.
struct RowOfCta {
  int batch, group;
  int row;  // of the group; it may be below 0, or past the end

  /// Finds the row of this CTA. Called by whole warps.
  __device__ __forceinline__ RowOfCta(const ForwardParams& p, const DecodeGrid& grid) {
    const uint32_t heads_of_group = grid.group.value;
    if (grid.tiles.by_rows) {
      const uint32_t heads = static_cast<uint32_t>(p.heads_q), in_memory = blockIdx.x / heads;
      const uint32_t head = blockIdx.x - in_memory * heads;
      const auto first_row = [&](int k) { return clamp_index(p.seq.cu_seqlens_q[k], 0, p.total_q); };
      batch = last_index_up_to(in_memory, static_cast<int>(p.batch), first_row);
      group = static_cast<int>(grid.group.quotient(head));
      const int query = static_cast<int>(in_memory - first_row(batch));
      row = query * static_cast<int>(heads_of_group) + static_cast<int>(head - group * heads_of_group);
      if (query < 0) row = -1;
    } else {
      const uint32_t rows = static_cast<uint32_t>(p.seqlen_q) * heads_of_group, flat_group = blockIdx.x / rows;
      batch = static_cast<int>(grid.groups.quotient(flat_group));
      group = static_cast<int>(flat_group) - batch * static_cast<int>(grid.groups.value);
      row = static_cast<int>(blockIdx.x - flat_group * rows);
    }
  }

  static int64_t ctas(const ForwardParams& p, const DecodeGrid& grid) {
    return p.heads_q * (grid.tiles.by_rows ? p.total_q : p.batch * p.seqlen_q);
  }
};

template <class Element>
__global__ void __launch_bounds__(kMaxCombineThreads)
    combine_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ DecodeGrid grid,
                   const __grid_constant__ DecodePartials partials) {
  using Unit = ScoreUnit<Element>;
  __shared__ CombinedSplits<Unit> s_groups[kMaxCombineThreads];
  const RowOfCta at(p, grid);
  const int flat = at.row;
  const DecodeTile tile(p, grid, at.batch, at.group, flat / grid.block_m);
  const int row = flat % grid.block_m;
  // It waits before any return: else this grid could end, and the next one start, while the previous one still writes.
  ptx::wait_for_previous_grid();
  if (flat < 0 || row >= tile.rows || !tile.is_split()) return;

  const int columns = static_cast<int>(p.head_dim_v), threads_per_group = combine_threads_per_group(columns);
  const int groups = static_cast<int>(blockDim.x) / threads_per_group;
  const int group = threadIdx.x / threads_per_group;
  const int column = threadIdx.x % threads_per_group * kCombineColumns;
  CombinedSplits<Unit> total{-INFINITY, 0.0f, kNoColumns};
  if (column < columns) total = combine_splits<Unit>(partials, grid, tile, row, column, columns, group, groups);
  if (groups > 1) {
    s_groups[threadIdx.x] = total;
    __syncthreads();
  }
  if (group > 0 || column >= columns) return;
  for (int first = 1; first < groups; first += kCombineUnroll) {
    CombinedSplits<Unit> others[kCombineUnroll];
#pragma unroll
    for (int n = 0; n < kCombineUnroll; ++n) {
      others[n] = s_groups[min(first + n, groups - 1) * threads_per_group + threadIdx.x];
      if (first + n >= groups) others[n].maximum = -INFINITY;
    }
    total.add(others);
  }
  const DecodeRow<Element> target(p, grid, tile.sequence, flat);
  const RowEnd end = finish_row<Unit>(total.maximum, total.sum, sink_of(p, target.head));
  if (column == 0) *target.lse = end.lse;
  store_four(target.out + column, total.out, end.scale);
}

template <class Element>
void run_combine(const ForwardParams& params, const DecodeGrid& grid, const DecodePartials& partials,
                 cudaStream_t stream) {
  const int64_t ctas = RowOfCta::ctas(params, grid);
  // Where splits have a fixed size, grid.splits is the largest possible number of splits, on which no result may
  // depend.
  const int threads_per_group = combine_threads_per_group(static_cast<int>(params.head_dim_v));
  const int most = kMaxCombineThreads / threads_per_group;
  const int wanted = (static_cast<int>(grid.splits.value) + kCombineUnroll - 1) / kCombineUnroll;
  const int groups = grid.split_size.value > 0 ? most : std::min(most, wanted);
  LaunchShape shape{grid_of(ctas), dim3(static_cast<unsigned>(groups * threads_per_group))};
  shape.overlaps_previous = true;
  launch("combine", combine_kernel<Element>, shape, stream, params, grid, partials);
}

}  // namespace flash_ext::sm80
