// Work tiles of the float32 forward: the order in which CTAs take them, and the queue by which the warps of a CTA go
// through them.
#pragma once

#include <new>

#include "kernels/common/scheduler/forward_schedule.cuh"
#include "kernels/common/scheduler/work_tile_queue.cuh"
#include "shape.h"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// As schedule_forward(), except that all query tiles are ordered by length, the last ones too.
template <class Config>
ForwardSchedule schedule_forward_f32(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  const int64_t group = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const int64_t blocks_m = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t fitting = forward_f32_section(heads, group, p.seqlen_k, p.head_dim + p.head_dim_v);
  const int64_t last = (heads - 1) / fitting * fitting;
  ForwardSchedule schedule = {static_cast<int>(blocks_m), static_cast<int>(grid_size(heads)), static_cast<int>(fitting),
                              static_cast<int>(last), static_cast<unsigned long long*>(workspace)};
  schedule.heads_of_entry = LongDivisor(p.heads_q);
  use_list(schedule, list, workspace);
  return schedule;
}

/// The work tiles of a CTA. Each of its warps goes through them.
template <class Config>
class ForwardF32Queue : public WorkTileQueue<ForwardF32Storage<Config>> {
  using Base = WorkTileQueue<ForwardF32Storage<Config>>;
  using Base::at_, Base::storage_;

 public:
  using Base::Base;
  using typename Base::WorkTile;

  /// Publishes the next work tile, or that there is none. Called by one thread.
  __device__ __forceinline__ void push(const ForwardParams& p, const ForwardSchedule& schedule) {
    const int slot = at_.stage();
    ptx::mbarrier_wait(ptx::shared_address(&storage_.work_tile_empty[slot]), at_.parity() ^ 1);
    int64_t position = storage_.position;
    bool found = false;
    if (schedule.list) ptx::wait_for_previous_grid();  // which lists the tiles
    for (; !found && position < schedule.size(); position = schedule.take()) {
      const TileIndex tile = schedule.locate(position);
      const Sequence sequence(p, tile.sequence, tile.head);
      const int blocks = (sequence.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
      found = tile.tile < blocks;
      if (found) new (&storage_.work_tile_in(slot)) WorkTile(sequence, blocks, tile.tile);
      if (!found && schedule.list) break;  // there are no more
    }
    storage_.position = position;
    storage_.has_work_tile[slot] = found;
    ptx::mbarrier_arrive(ptx::shared_address(&storage_.work_tile_full[slot]));
  }
};

}  // namespace flash_ext::sm90
