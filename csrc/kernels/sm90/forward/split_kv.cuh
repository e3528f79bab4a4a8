// Works that are cut along the keys (split_kv.h): their order, and the merging of their parts.
//
//   r = max_k r_k,   l = sum_k 2^(r_k - r) l_k,   out = sum_k 2^(r_k - r) O_k / l
//
// A part leaves O, r and l in float, as its lanes hold them: a warp's 16 rows lie side by side, lane by lane. The order
// of the sums is that of the keys, whoever computed them.
#pragma once

#include "kernels/sm90/common/store_rows.cuh"
#include "producer.cuh"
#include "split_kv.h"

namespace flash_ext::sm90 {

template <class Config>
struct PartTile {
  static constexpr int kD = Config::kHeadDimV / 8;
  static constexpr int kPieces = part_pieces_of_warp({Config::kHeadDim, Config::kHeadDimV});
  static constexpr int64_t kWorkPieces = int64_t{Config::kGroups} * kGroupWarps * kPieces;

  /// Of a lane; those that follow are 32 apart.
  __device__ __forceinline__ static float4* of_lane(float4* g_part, int group, int warp, int lane) {
    return g_part + (group * kGroupWarps + warp) * kPieces + lane;
  }
};

/// ForwardSchedule, whose last works are cut.
struct CutSchedule : ForwardSchedule {
  ForwardCut cut;
  float4* parts;  // work by work
  uint64_t part_pieces;

  int64_t positions = cut.positions();

  __device__ __forceinline__ int64_t size() const { return positions; }
  __device__ __forceinline__ int64_t take() const { return taken ? ForwardSchedule::take() : size(); }

  __device__ __forceinline__ WorkTile locate(int64_t position) const {
    return ForwardSchedule::locate(position < cut.whole ? position : cut.whole + place(position) % cut.works);
  }

  /// Leaves a work that was made for a position what it shall do of it.
  template <class Work>
  __device__ __forceinline__ void trim(int64_t position, Work& work) const {
    if (position < cut.whole) return;
    const uint32_t at = place(position);
    const int part = cut.parts - 1 - static_cast<int>(at / cut.works);
    const int begin = part == 0 ? 0 : cut.short_tiles + (part - 1) * cut.long_tiles;
    work.keep_tiles(begin, part == 0 ? cut.short_tiles : begin + cut.long_tiles);
    work.part = part_of(at % cut.works, part);
  }

  __device__ __forceinline__ float4* part_of(uint32_t work, uint32_t part) const {
    return parts + (work * cut.parts + part) * part_pieces;
  }

 private:
  /// Among the parts.
  __device__ __forceinline__ uint32_t place(int64_t position) const {
    return static_cast<uint32_t>(position - cut.whole);
  }
};

template <class Config>
CutSchedule schedule_cut_forward(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  const ForwardCut cut = cut_forward(p, Config::kShape, {Config::kHeadDim, Config::kHeadDimV});
  CutSchedule schedule = {schedule_forward<Config>(p, workspace), cut, nullptr, PartTile<Config>::kWorkPieces};
  if (workspace) schedule.parts = reinterpret_cast<float4*>(static_cast<char*>(workspace) + kPartsOffset);
  if (cut.positions() <= device_attribute(cudaDevAttrMultiProcessorCount)) schedule.taken = nullptr;
  use_list(schedule, list, workspace);
  if (list.listed) schedule.positions = schedule.works;  // what the bound allows may be more than the list has room for
  return schedule;
}

template <class Config>
using ScheduleOf = std::conditional_t<Config::kCuts, CutSchedule, ForwardSchedule>;

template <class Config>
ScheduleOf<Config> make_schedule(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  if constexpr (Config::kCuts) {
    return schedule_cut_forward<Config>(p, list, workspace);
  } else {
    ForwardSchedule schedule = schedule_forward<Config>(p, workspace);
    use_list(schedule, list, workspace);
    return schedule;
  }
}

/// A block for 64 rows of a cut work.
template <class Config>
__global__ void __launch_bounds__(kGroupThreads)
    merge_parts_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ CutSchedule schedule) {
  using Element = typename Config::Element;
  using Tile = PartTile<Config>;
  const int work = static_cast<int>(blockIdx.x) / Config::kGroups,
            group = static_cast<int>(blockIdx.x) % Config::kGroups;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const WorkTile tile = schedule.locate(schedule.cut.whole + work);
  const Sequence sequence(p, tile.sequence, tile.head);
  const auto first_query_of = [&](int block) {
    return ForwardLoader<Config>::first_query_of(block, schedule.blocks_m, sequence.seqlen_q);
  };
  const int end_query = first_query_of(tile.tile + 1);
  const int first_row = first_query_of(tile.tile) + group * kGroupRows + warp * 16;
  ptx::wait_for_previous_grid();
  if (first_row >= end_query) return;

  const int parts = schedule.cut.parts;
  const auto part_of = [&](int part) { return Tile::of_lane(schedule.part_of(work, part), group, warp, lane); };
  float reference[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int part = 0; part < parts; ++part) {
    const float4 state = part_of(part)[Tile::kD * 32];
    reference[0] = fmaxf(reference[0], state.x);
    reference[1] = fmaxf(reference[1], state.y);
  }
  float out[Tile::kD][4] = {};
  for (int part = 0; part < parts; ++part) {
    const float4* const g_part = part_of(part);
    const float4 state = g_part[Tile::kD * 32];
    const float factor[2] = {state.x == reference[0] ? 1.0f : ptx::exp2_approx(state.x - reference[0]),
                             state.y == reference[1] ? 1.0f : ptx::exp2_approx(state.y - reference[1])};
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
    const RowEnd end = finish_row(reference[r], sum[r], sink);
    const int row = first_row + 8 * r + lane / 4;
    const bool exists = row < end_query;
    write_out_row(exists ? rows.row(row) : nullptr, out, r, end.scale, lane, static_cast<int>(p.head_dim_v));
    if (exists && lane % 4 == 0) g_lse[row] = end.lse;
  }
}

inline unsigned forward_blocks(const CutSchedule& schedule) {
  return grid_size(std::min<int64_t>(schedule.positions, device_attribute(cudaDevAttrMultiProcessorCount)));
}

template <class Config>
void merge_parts(const ForwardParams& p, const CutSchedule& schedule, cudaStream_t stream) {
  if (schedule.cut.works == 0) return;
  LaunchShape shape = {grid_of(int64_t{schedule.cut.works} * Config::kGroups), dim3(kGroupThreads)};
  shape.overlaps_previous = true;
  launch("sm90/forward", merge_parts_kernel<Config>, shape, stream, p, schedule);
}

}  // namespace flash_ext::sm90
