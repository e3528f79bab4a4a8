// Split-KV: the order of query tiles whose keys are split over CTAs, and the combination of their results.
//
//   r = max_k r_k,   l = sum_k 2^(r_k - r) l_k,   out = sum_k 2^(r_k - r) O_k / l
//
// Too few query tiles, in a whole call or in its tail wave, leave SMs idle. So some tiles are split; csrc/plan decides
// which and how. CTAs take, in this order: whole tiles; the long splits of split tiles; whole tiles that cost less; the
// short splits. While the long splits run, an SM without one takes several short splits.
//
// A split stores O, r and l in float, in the order of its lanes: a warp's 16 rows lie side by side, lane by lane.
// Splits are summed in the order of the keys, whichever CTA computed them.
#pragma once

#include "kernels/common/sanitise.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

template <class Config>
struct SplitTile {
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kFloat4s = split_float4s_of_warp({Config::kHeadDim, Config::kHeadDimV});
  static constexpr int64_t kWorkTileFloat4s = int64_t{Config::kWarpgroups} * kWarpgroupWarps * kFloat4s;

  /// The first float4 of a lane; its next ones are 32 apart.
  __device__ __forceinline__ static float4* of_lane(float4* g_split, int group, int warp, int lane) {
    return g_split + (group * kWarpgroupWarps + warp) * kFloat4s + lane;
  }
  /// The stabilisers and sums of the lane's two rows.
  template <class Float4>
  __device__ __forceinline__ static Float4* state(Float4* g_lane) {
    return g_lane + kD * 32;
  }
  /// Whether V held Inf or NaN that some rows do not see; the same for all lanes.
  template <class Float4>
  __device__ __forceinline__ static auto* met_non_finite(Float4* g_lane, int lane) {
    return reinterpret_cast<std::conditional_t<std::is_const_v<Float4>, const int, int>*>(state(g_lane) + 32 - lane);
  }
};

/// A ForwardSchedule, some of whose work tiles are split.
struct SplitKvSchedule : ForwardSchedule {
  KeySplits splits;
  float4* partials;  // work tile by work tile
  uint64_t split_float4s;

  int64_t positions = work_tiles + splits.more_positions();
  uint32_t long_positions = splits.long_splits * splits.tiles;
  int32_t long_share = splits.long_splits == 0
                           ? 0
                           : (KeySplits::kWholeShare - splits.short_splits * splits.short_share) / splits.long_splits;

  FLASH_EXT_HOST_DEVICE int64_t size() const { return positions; }
  __device__ __forceinline__ int64_t next(int64_t position) const {
    if (in_turn) return turn_after(position);
    return taken ? ForwardSchedule::take() : size();
  }

  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    if (position >= splits.first_tile) {
      const SplitOfTile found = split_at(position);
      position = splits.first_tile + (found.rank < 0 ? splits.tiles : 0) + found.tile;
    }
    return ForwardSchedule::locate(position);
  }

  /// Restricts a work tile to the split that a position stands for.
  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t position, WorkTile& work_tile) const {
    if (position < splits.first_tile) return;
    const SplitOfTile found = split_at(position);
    if (found.rank < 0) return;
    const int split = splits.per_tile() - 1 - found.rank;
    const TileSpan& tiles = work_tile.tiles;
    const int begin = begin_of(split, tiles), end = begin_of(split + 1, tiles);
    work_tile.keep_tiles(begin, end);
    work_tile.partial = partial_of(found.tile, split);
  }

  __device__ __forceinline__ float4* partial_of(uint32_t work_tile, uint32_t split) const {
    return partials + (work_tile * splits.per_tile() + split) * split_float4s;
  }

 private:
  /// The split, or whole tile, at a position after the first whole tiles. rank: of the split, counted from the last
  /// keys; -1 for a whole tile.
  struct SplitOfTile {
    int tile, rank;
  };

  __device__ __forceinline__ SplitOfTile split_at(int64_t position) const {
    uint32_t at = static_cast<uint32_t>(position - splits.first_tile);
    if (at >= long_positions) {
      at -= splits.unsplit_after;
      if (static_cast<int32_t>(at) < static_cast<int32_t>(long_positions))
        return {static_cast<int>(at + splits.unsplit_after - long_positions), -1};
    }
    return {static_cast<int>(at % splits.tiles), static_cast<int>(at / splits.tiles)};
  }

  /// Returns the first key tile of a split. Splits are counted from the first keys.
  __device__ __forceinline__ int begin_of(int split, const TileSpan& tiles) const {
    const int left = splits.per_tile() - split;  // splits from this one on
    if (split == 0) return tiles.begin;
    if (left == 0) return tiles.end;
    const uint32_t share =
        split < splits.short_splits ? split * splits.short_share : KeySplits::kWholeShare - left * long_share;
    return tiles.begin + static_cast<int>(__umulhi(tiles.end - tiles.begin, share << 16));
  }
};

template <class Config>
SplitKvSchedule schedule_split_forward(const AttentionParams& p, const KeySplits& splits, const WorkListPlan& list,
                                       void* workspace) {
  SplitKvSchedule schedule = {schedule_forward<Config>(p, workspace), splits, nullptr,
                              SplitTile<Config>::kWorkTileFloat4s};
  if (schedule.splits.tiles == 0) schedule.splits.first_tile = schedule.work_tiles;
  if (workspace) schedule.partials = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPartialsOffset);
  if (needs_no_counter(p, Config::kShape, splits)) {
    schedule.taken = nullptr;
    schedule.in_turn = schedule.positions > ctas_at_a_time(Config::kShape);
  }
  use_list(schedule, list, workspace);
  if (list.listed) {
    schedule.in_turn = false;
    schedule.positions = schedule.work_tiles;  // the bound may allow more than the list has room for
    schedule.splits.first_tile = schedule.positions;
  }
  return schedule;
}

/// Columns of out that a CTA combines: as many as write_out_row() exchanges. More CTAs have more loads in flight.
constexpr int kCombinedColumns = 32;

/// Finds the largest stabilisers of the lane's two rows. partial_of(split): the lane's part of a split. Returns whether
/// a split met Inf or NaN that some rows do not see.
template <class Tile, class PartialOf>
__device__ __forceinline__ bool find_stabilisers(float (&stabiliser)[2], int num_splits, int lane,
                                                 PartialOf partial_of) {
  bool met_non_finite = false;
#pragma unroll 4
  for (int split = 0; split < num_splits; ++split) {
    const float4 state = *Tile::state(partial_of(split));
    stabiliser[0] = fmaxf(stabiliser[0], state.x);
    stabiliser[1] = fmaxf(stabiliser[1], state.y);
    met_non_finite |= Tile::met_non_finite(partial_of(split), lane)[0] != 0;
  }
  return met_non_finite;
}

/// Adds the splits of the lane's two rows, in the order of the keys.
template <class Tile, int kD, class PartialOf>
__device__ __forceinline__ void add_splits(float (&out)[kD][4], float (&sum)[2], const float (&stabiliser)[2],
                                           int num_splits, int first_column, PartialOf partial_of) {
#pragma unroll 4
  for (int split = 0; split < num_splits; ++split) {
    const float4* const g_split = partial_of(split);
    const float4 state = *Tile::state(g_split);
    const float factor[2] = {state.x == stabiliser[0] ? 1.0f : ptx::exp2_approx(state.x - stabiliser[0]),
                             state.y == stabiliser[1] ? 1.0f : ptx::exp2_approx(state.y - stabiliser[1])};
    sum[0] = fmaf(factor[0], state.z, sum[0]);
    sum[1] = fmaf(factor[1], state.w, sum[1]);
#pragma unroll
    for (int d = 0; d < kD; ++d) {
      const float4 partial = g_split[(first_column / 8 + d) * 32];
      out[d][0] = fmaf(factor[0], partial.x, out[d][0]);
      out[d][1] = fmaf(factor[0], partial.y, out[d][1]);
      out[d][2] = fmaf(factor[1], partial.z, out[d][2]);
      out[d][3] = fmaf(factor[1], partial.w, out[d][3]);
    }
  }
}

/// Combines the splits of split work tiles: a CTA for 64 rows and kCombinedColumns columns.
template <class Config>
__global__ void __launch_bounds__(kWarpgroupThreads)
    combine_splits_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ SplitKvSchedule schedule) {
  using Element = typename Config::Element;
  using Tile = SplitTile<Config>;
  constexpr int kD = kCombinedColumns / 8;
  const int work_tile = static_cast<int>(blockIdx.x) / Config::kWarpgroups,
            group = static_cast<int>(blockIdx.x) % Config::kWarpgroups, first_column = blockIdx.y * kCombinedColumns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const TileIndex tile = schedule.locate(schedule.splits.first_tile + work_tile);
  const Sequence sequence(p, tile.sequence, tile.head);
  const auto first_query_of = [&](int block) {
    return ForwardWorkTile<Config>::first_query_of(block, schedule.blocks_m, sequence.seqlen_q);
  };
  const int end_query = first_query_of(tile.tile + 1);
  const int first_query = first_query_of(tile.tile) + group * kWarpgroupRows, first_row = first_query + warp * 16;
  ptx::wait_for_previous_grid();
  if (first_query >= end_query) return;

  const int num_splits = schedule.splits.per_tile();
  const auto partial_of = [&](int split) {
    return Tile::of_lane(schedule.partial_of(work_tile, split), group, warp, lane);
  };
  float stabiliser[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const bool met_non_finite = find_stabilisers<Tile>(stabiliser, num_splits, lane, partial_of);
  float out[kD][4] = {};
  add_splits<Tile>(out, sum, stabiliser, num_splits, first_column, partial_of);
  const float sink = sink_of(p, sequence.head);
  auto rows = query_rows<Element>(p.out, sequence);
  rows.base += first_column;
  const int columns = static_cast<int>(p.head_dim_v) - first_column;
  float* const g_lse = static_cast<float*>(p.lse.data) + sequence.lse_offset(p.lse);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowEnd end = finish_row(stabiliser[r], sum_of_row(sum[r]), sink);
    const int row = first_row + 8 * r + lane / 4;
    const bool exists = row < end_query;
    write_out_row(exists ? rows.row(row) : nullptr, out, r, end.scale, lane, columns);
    if (exists && first_column == 0 && lane % 4 == 0) g_lse[row] = end.lse;
  }

  // Sanitising removed non-finite values from V where some rows do not see them; the rows that do get them here.
  if (!__syncthreads_or(met_non_finite)) return;
  AttentionParams columns_alone;
  columns_alone.head_dim_v = min(columns, kCombinedColumns);
  auto values = key_rows<Element, Config::kReadsCache>(p, p.v, sequence);
  values.base += first_column;
  const int end_row = min(first_query + kWarpgroupRows, end_query);
  const TileSpan keys = sequence.template key_tiles<Config::kBlockN>(first_query, end_row);
  add_non_finite<Element, kWarpgroupThreads>(columns_alone, sequence, rows, values, first_query, end_row,
                                             keys.begin * Config::kBlockN,
                                             min(keys.end * Config::kBlockN, sequence.seqlen_k));
}

template <class Config>
void combine_splits(const ForwardParams& p, const SplitKvSchedule& schedule, cudaStream_t stream) {
  if (schedule.splits.tiles == 0) return;
  LaunchShape shape = {grid_of(int64_t{schedule.splits.tiles} * Config::kWarpgroups,
                               (p.head_dim_v + kCombinedColumns - 1) / kCombinedColumns),
                       dim3(kWarpgroupThreads)};
  shape.overlaps_previous = true;
  launch("sm90/forward", combine_splits_kernel<Config>, shape, stream, p, schedule);
}

}  // namespace flash_ext::sm90
