// The order in which CTAs take work tiles, and the warp of a CTA that writes the metadata of work tiles and requeues
// failed ones.
#pragma once

#include <new>

#include "kernels/common/scheduler/forward_schedule.cuh"
#include "kernels/ptx/reread.h"
#include "launch_plan.h"
#include "storage.cuh"
#include "tile_order.h"

namespace flash_ext::sm90 {

template <class Config>
ForwardSchedule schedule_forward(const AttentionParams& p, void* workspace) {
  const bool see_all = p.window.left < 0 && p.window.right < 0;
  // Sequences in a cache count as equally long, because the plan assumes the same when it splits their keys.
  const bool equal_lengths = has_equal_lengths(p) || (Config::kReadsCache && !p.seq.cu_seqlens_q);
  const HeadsOfCall call = {p.batch * p.heads_q, p.heads_q / p.heads_kv, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2,
                            p.seqlen_q,          equal_lengths,          see_all,
                            Config::kVisible};
  const HeadOrder order = head_order(call, Config::kBlockM, ctas_at_a_time(Config::kShape));
  const int64_t blocks_m = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  ForwardSchedule schedule = {static_cast<int>(blocks_m), static_cast<int>(grid_size(call.heads)),
                              static_cast<int>(order.side_by_side), static_cast<int>(order.last_section),
                              static_cast<unsigned long long*>(workspace)};
  schedule.heads_of_entry = LongDivisor(p.heads_q);
  return schedule;
}

/// Where batch entries share a bias, the tiles of one head of all batch entries follow each other.
struct ForwardOptionsSchedule : ForwardSchedule {
  int batch, heads_q;
  bool batch_first;

  ForwardOptionsSchedule(const ForwardSchedule& schedule, const AttentionParams& p)
      : ForwardSchedule(schedule),
        batch(static_cast<int>(p.batch)),
        heads_q(static_cast<int>(p.heads_q)),
        batch_first(p.bias.data && p.bias.batch_stride == 0 && p.bias.head_stride != 0 && p.bias.row_stride != 0) {}

  __device__ __forceinline__ TileIndex locate(int64_t position) const {
    if (list) return list.locate(static_cast<int>(position));
    ForwardOptionsSchedule here = *this;
    // reread(): values that depend on these are computed again for each work tile, because the producers have no
    // registers to keep them.
    here.blocks_m = ptx::reread(blocks_m), here.section_heads = ptx::reread(section_heads);
    int head, block;
    here.locate_in_sections(position, head, block);
    if (batch_first) head = head % batch * heads_q + head / batch;
    return of_entry(head, block);
  }
};

/// For block masks: a list of query tiles, and where the blocks of each begin in the mask's lists.
struct ForwardBlocksSchedule : ForwardSchedule {
  const int32_t* offsets;
  int64_t batch_stride, head_stride;
  int block_m, tiles_of_block, most_blocks;

  /// Restricts a work tile to the blocks that the mask lists for it.
  template <class WorkTile>
  __device__ __forceinline__ void trim(int64_t, WorkTile& work_tile) const {
    const int32_t* const row = offsets + work_tile.sequence.batch * batch_stride +
                               work_tile.sequence.head * head_stride + work_tile.first_query / block_m;
    const int begin = min(max(row[0], 0), most_blocks), end = min(max(row[1], begin), most_blocks);
    work_tile.list_blocks(begin, end - begin, tiles_of_block);
  }
};

/// Fills the slots with the work tiles of a CTA, and requeues failed ones. All lanes of a warp call its functions.
template <class Config>
class ForwardScheduler {
 public:
  using Storage = ForwardStorageOf<Config>;
  using WorkTile = ForwardWorkTile<Config>;

  __device__ __forceinline__ ForwardScheduler(const ForwardParams& p, Storage& storage) : p_(p), storage_(storage) {}

  /// Makes and publishes work tiles. `start` lets the CTA begin. The first work tile is made before it, because that
  /// takes long. The same instructions make all others, because fetching more instructions would take long, too.
  template <class Schedule, class Start>
  __device__ __forceinline__ void run(const Schedule& schedule, int lane, Start start) {
    zero_slots(lane);
    if (schedule.list) ptx::wait_for_previous_grid();  // which lists the tiles
    bool is_first = true;
    for (int64_t position = blockIdx.x;; position = next(schedule, position, lane)) {
      const bool exists = position < schedule.size();
      const bool made = exists && make_work_tile(schedule, position, lane, is_first);
      if (is_first) start();
      is_first = false;
      if (made) publish_tile(lane);
      // Without a list, a position may have no work tile: its sequence is shorter than the longest.
      if (!exists || (!made && schedule.list)) break;
    }
    // If one of the last work tiles failed, it is requeued into the slot that has been free for longest. It is checked
    // again there, because it may fail twice.
    RingPosition<Config::kSlots> at = slot_;
    for (int unchecked = Config::kSlots; unchecked > 0; --unchecked, at.advance())
      if (wait_for_slot(at)) {
        requeue_tile(at, lane);
        ++unchecked;
      }
    wait_for_slot(slot_);
    if (lane != 0) return;
    storage_.has_work_tile[slot_.stage()] = false;
    ptx::mbarrier_arrive(address(storage_.work_tile_full[slot_.stage()]));
  }

 private:
  /// Marks all slots as not failed.
  __device__ __forceinline__ void zero_slots(int lane) const {
    if (lane < Config::kSlots) storage_.work_tile_in(lane).failed = false;
    __syncwarp();
  }

  template <class Schedule>
  __device__ __forceinline__ static int64_t next(const Schedule& schedule, int64_t position, int lane) {
    return __shfl_sync(~0u, lane == 0 ? schedule.next(position) : 0, 0);
  }

  /// Makes the work tile of a position in the next slot; each lane makes the part of a warpgroup. Returns false if the
  /// position has none, because shorter sequences have fewer tiles. is_first: all slots are free, and barriers may not
  /// be initialised yet.
  template <class Schedule>
  __device__ __forceinline__ bool make_work_tile(const Schedule& schedule, int64_t position, int lane, bool is_first) {
    const TileIndex tile = schedule.locate(position);
    const Sequence sequence(p_, tile.sequence, tile.head, Sequence::SkipsReading());
    const int blocks = (sequence.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
    if (tile.tile >= blocks) return false;
    const int first_query = WorkTile::first_query_of(tile.tile, blocks, sequence.seqlen_q);
    const int end_query = WorkTile::first_query_of(tile.tile + 1, blocks, sequence.seqlen_q);
    if (!is_first)
      while (wait_for_slot(slot_)) requeue_tile(slot_, lane);
    __syncwarp();  // all lanes have read that the slot's last work tile did not fail
    WorkTile& work_tile = storage_.work_tile_in(slot_.stage());
    if (lane == 0) new (&work_tile) WorkTile(sequence, first_query, end_query);
    __syncwarp();
    // The lane after the lanes of the warpgroups finds the key tiles of all rows.
    constexpr int kAllRows = Config::kWarpgroups;
    const int first = first_query + (lane < kAllRows ? lane * kWarpgroupRows : 0);
    const int end = lane < kAllRows ? min(first + kWarpgroupRows, end_query) : end_query;
    const TileSpan tiles = work_tile.sequence.template key_tiles<Config::kBlockN>(first, end);
    const int all_begin = __shfl_sync(~0u, tiles.begin, kAllRows);
    if (lane < kAllRows) work_tile.set_rows(p_, lane, first, tiles, all_begin);
    if (lane == kAllRows)
      work_tile.set_tiles(p_, tiles, Config::kReadsCache || p_.seq.cu_seqlens_k || p_.seq.seqused_k);
    __syncwarp();
    if (lane == 0) schedule.trim(position, work_tile);
    __syncwarp();
    return true;
  }

  /// Waits until all warps have released a slot; true if its work tile failed.
  __device__ __forceinline__ bool wait_for_slot(const RingPosition<Config::kSlots>& at) const {
    ptx::mbarrier_wait(address(storage_.work_tile_empty[at.stage()]), at.parity() ^ 1);
    return storage_.work_tile_in(at.stage()).failed;
  }

  __device__ __forceinline__ void requeue_tile(const RingPosition<Config::kSlots>& failed, int lane) {
    __syncwarp();  // all lanes have read that it failed
    if (lane == 0) storage_.work_tile_in(failed.stage()).requeue();
    __syncwarp();
    // Byte by byte: words would alias the members.
    const auto* const s_from = reinterpret_cast<const unsigned char*>(&storage_.work_tile_in(failed.stage()));
    auto* const s_to = reinterpret_cast<unsigned char*>(&storage_.work_tile_in(slot_.stage()));
#pragma unroll 1
    for (int at = lane; at < static_cast<int>(sizeof(WorkTile)); at += 32) s_to[at] = s_from[at];
    __syncwarp();
    publish_tile(lane);
  }

  /// Publishes the work tile in slot_. Returns when most of its loads are issued: it is then time to take another.
  __device__ __forceinline__ void publish_tile(int lane) {
    if (lane == 0) {
      storage_.has_work_tile[slot_.stage()] = true;
      ptx::mbarrier_arrive(address(storage_.work_tile_full[slot_.stage()]));
    }
    static_assert(Config::kSlots % 2 == 0, "the parity of a slot follows from its number");
    const uint32_t parity = slot_.stage() & 1;
    slot_.advance();
    ptx::mbarrier_wait(address(storage_.work_tile_loaded), parity);
  }

  const ForwardParams& p_;
  Storage& storage_;
  RingPosition<Config::kSlots> slot_;  // the next one to fill
};

}  // namespace flash_ext::sm90
