// Works that are split along the keys (split_kv.h): their order, and the merging of their parts.
//
//   r = max_k r_k,   l = sum_k 2^(r_k - r) l_k,   out = sum_k 2^(r_k - r) O_k / l
//
// A part leaves O, r and l in float, as its lanes hold them: a warp's 16 rows lie side by side, lane by lane. The order
// of the sums is that of the keys, whoever computed them.
#pragma once

#include "kernels/launch.h"
#include "kernels/sm90/common/store_rows.cuh"
#include "producer.cuh"
#include "split_kv.h"

namespace flash_ext::sm90 {

template <class Config>
struct PartTile {
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kPieces = part_pieces_of_warp({Config::kHeadDim, Config::kHeadDimV});
  static constexpr int64_t kWorkTilePieces = int64_t{Config::kGroups} * kWarpgroupWarps * kPieces;

  /// Of a lane; those that follow are 32 apart.
  __device__ __forceinline__ static float4* of_lane(float4* g_part, int group, int warp, int lane) {
    return g_part + (group * kWarpgroupWarps + warp) * kPieces + lane;
  }
};

/// ForwardSchedule, whose last work tiles are split.
struct SplitKvSchedule : ForwardSchedule {
  SplitKv split;
  float4* parts;  // work by work
  uint64_t part_pieces;

  int64_t positions = split.positions();

  __device__ __forceinline__ int64_t size() const { return positions; }
  __device__ __forceinline__ int64_t take() const { return taken ? ForwardSchedule::take() : size(); }

  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    return ForwardSchedule::locate(position < split.unsplit ? position
                                                            : split.unsplit + slot(position) % split.work_tiles);
  }

  /// Leaves a work tile that was made for a position what it shall do of it.
  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t position, WorkTile& work_tile) const {
    if (position < split.unsplit) return;
    const uint32_t at = slot(position);
    const int part = split.parts - 1 - static_cast<int>(at / split.work_tiles);
    const int begin = part == 0 ? 0 : split.short_tiles + (part - 1) * split.long_tiles;
    work_tile.keep_tiles(begin, part == 0 ? split.short_tiles : begin + split.long_tiles);
    work_tile.part = part_of(at % split.work_tiles, part);
  }

  __device__ __forceinline__ float4* part_of(uint32_t work_tile, uint32_t part) const {
    return parts + (work_tile * split.parts + part) * part_pieces;
  }

 private:
  /// Among the parts.
  __device__ __forceinline__ uint32_t slot(int64_t position) const {
    return static_cast<uint32_t>(position - split.unsplit);
  }
};

template <class Config>
SplitKvSchedule schedule_split_forward(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
  const SplitKv split = split_forward(p, Config::kShape, {Config::kHeadDim, Config::kHeadDimV}, num_sms);
  SplitKvSchedule schedule = {schedule_forward<Config>(p, workspace), split, nullptr,
                              PartTile<Config>::kWorkTilePieces};
  if (workspace) schedule.parts = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPartsOffset);
  if (split.positions() <= num_sms) schedule.taken = nullptr;
  use_list(schedule, list, workspace);
  if (list.listed)
    schedule.positions = schedule.work_tiles;  // what the bound allows may be more than the list has room for
  return schedule;
}

template <class Config>
using ScheduleOf = std::conditional_t<Config::kSplitsKv, SplitKvSchedule, ForwardSchedule>;

template <class Config>
ScheduleOf<Config> make_schedule(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  if constexpr (Config::kSplitsKv) {
    return schedule_split_forward<Config>(p, list, workspace);
  } else {
    ForwardSchedule schedule = schedule_forward<Config>(p, workspace);
    use_list(schedule, list, workspace);
    return schedule;
  }
}

/// A CTA for 64 rows of a cut work tile.
template <class Config>
__global__ void __launch_bounds__(kWarpgroupThreads)
    combine_splits_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ SplitKvSchedule schedule) {
  using Element = typename Config::Element;
  using Tile = PartTile<Config>;
  const int work_tile = static_cast<int>(blockIdx.x) / Config::kGroups,
            group = static_cast<int>(blockIdx.x) % Config::kGroups;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const TileIndex tile = schedule.locate(schedule.split.unsplit + work_tile);
  const Sequence sequence(p, tile.sequence, tile.head);
  const auto first_query_of = [&](int block) {
    return ForwardProducer<Config>::first_query_of(block, schedule.blocks_m, sequence.seqlen_q);
  };
  const int end_query = first_query_of(tile.tile + 1);
  const int first_row = first_query_of(tile.tile) + group * kWarpgroupRows + warp * 16;
  ptx::wait_for_previous_grid();
  if (first_row >= end_query) return;

  const int parts = schedule.split.parts;
  const auto part_of = [&](int part) { return Tile::of_lane(schedule.part_of(work_tile, part), group, warp, lane); };
  float stabiliser[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int part = 0; part < parts; ++part) {
    const float4 state = part_of(part)[Tile::kD * 32];
    stabiliser[0] = fmaxf(stabiliser[0], state.x);
    stabiliser[1] = fmaxf(stabiliser[1], state.y);
  }
  float out[Tile::kD][4] = {};
  for (int part = 0; part < parts; ++part) {
    const float4* const g_part = part_of(part);
    const float4 state = g_part[Tile::kD * 32];
    const float factor[2] = {state.x == stabiliser[0] ? 1.0f : ptx::exp2_approx(state.x - stabiliser[0]),
                             state.y == stabiliser[1] ? 1.0f : ptx::exp2_approx(state.y - stabiliser[1])};
    sum[0] = fmaf(factor[0], state.z, sum[0]);
    sum[1] = fmaf(factor[1], state.w, sum[1]);
#pragma unroll
    for (int d = 0; d < Tile::kD; ++d) {
      const float4 piece = g_part[d * 32];
      out[d][0] = fmaf(factor[0], piece.x, out[d][0]);
      out[d][1] = fmaf(factor[0], piece.y, out[d][1]);
      out[d][2] = fmaf(factor[1], piece.z, out[d][2]);
      out[d][3] = fmaf(factor[1], piece.w, out[d][3]);
    }
  }
  const float sink = p.sink ? static_cast<const float*>(p.sink)[sequence.head] : -INFINITY;
  const auto rows = query_rows<Element>(p.out, sequence);
  float* const g_lse = static_cast<float*>(p.lse.data) + sequence.lse_offset(p.lse);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    const RowEnd end = finish_row(stabiliser[r], sum[r], sink);
    const int row = first_row + 8 * r + lane / 4;
    const bool exists = row < end_query;
    write_out_row(exists ? rows.row(row) : nullptr, out, r, end.scale, lane, static_cast<int>(p.head_dim_v));
    if (exists && lane % 4 == 0) g_lse[row] = end.lse;
  }
}

inline unsigned forward_blocks(const SplitKvSchedule& schedule) {
  return grid_size(std::min<int64_t>(schedule.positions, device_attribute(cudaDevAttrMultiProcessorCount)));
}

template <class Config>
void merge_parts(const ForwardParams& p, const SplitKvSchedule& schedule, cudaStream_t stream) {
  if (schedule.split.work_tiles == 0) return;
  LaunchShape shape = {grid_of(int64_t{schedule.split.work_tiles} * Config::kGroups), dim3(kWarpgroupThreads)};
  shape.overlaps_previous = true;
  launch("sm90/forward", combine_splits_kernel<Config>, shape, stream, p, schedule);
}

}  // namespace flash_ext::sm90
