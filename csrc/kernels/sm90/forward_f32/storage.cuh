// Tiles, registers and shared memory of the float32 forward, and what a CTA of it works on.
#pragma once

#include <algorithm>
#include <new>

#include "kernels/common/ring.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/cp_async.h"
#include "kernels/ptx/mbarrier.h"
#include "kernels/sm90/common/float_parts.cuh"
#include "kernels/sm90/forward/storage.cuh"
#include "shape.h"

namespace flash_ext::sm90 {

template <int kHeadDim_, bool kOptions_>
struct ForwardF32Config {
  static constexpr int kHeadDim = kHeadDim_;        // of q, k and v
  static constexpr bool kScoreOptions = kOptions_;  // softcap, ALiBi, any scale
  static constexpr ForwardF32Shape kShape = forward_f32_shape(kHeadDim);
  static constexpr int kGroups = kShape.groups;
  static constexpr int kBlockM = kGroups * kWarpgroupRows;
  static constexpr int kBlockN = kShape.keys;
  static constexpr int kStages = kShape.stages;
  static constexpr int kRegisters = kShape.registers, kProducerRegisters = kShape.producer_registers;
  static constexpr int kThreads = (kGroups + 1) * kWarpgroupThreads;
  static constexpr int kPanels = panels(kHeadDim);  // pieces of Q of a warpgroup
  static constexpr bool kSmallPieces = kBlockN == kSmallPieceRows;
  static constexpr int kPieces = kHeadDim / kBlockN;  // of K of a tile, and as many of V
  static constexpr int kStageBytes = Piece<kBlockN>::kBytes;

  static constexpr int kQueryBytes = kPanels * kPieceBytes;  // of a warpgroup
  static constexpr int kRingOffset = kGroups * kQueryBytes;
  static constexpr int kTilesBytes = kRingOffset + kStages * kStageBytes;
  static_assert(kWarpgroupRows == kPieceRows);
  static_assert(kGroups * kRegisters + kProducerRegisters <= 65536 / kThreads / 8 * 8 * (kGroups + 1),
                "no more registers than the launch allocates, else setmaxnreg waits for ever");
};

/// As schedule_forward(), but that all tiles of queries go by their length, the last ones too.
template <class Config>
ForwardSchedule schedule_forward_f32(const AttentionParams& p, const WorkListPlan& list, void* workspace) {
  constexpr int64_t kKeyBytesInL2 = 32 << 20;
  const int64_t key_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 4);
  const int64_t ratio = p.heads_q / p.heads_kv, heads = p.batch * p.heads_q;
  const int64_t blocks_m = (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int64_t fitting = std::clamp<int64_t>(kKeyBytesInL2 / key_bytes * ratio, std::min(ratio, heads), heads);
  const int64_t last = (heads - 1) / fitting * fitting;
  ForwardSchedule schedule = {static_cast<int>(blocks_m), static_cast<int>(grid_size(heads)), static_cast<int>(fitting),
                              static_cast<int>(last), static_cast<unsigned long long*>(workspace)};
  schedule.heads_of_entry = LongDivisor(p.heads_q);
  use_list(schedule, list, workspace);
  return schedule;
}

/// A tile of queries of one head, and the tiles of keys that it sees.
template <class Config>
struct ForwardF32WorkTile {
  Sequence sequence;
  int first_query, end_query;
  TileSpan tiles;                  // of all rows: these are loaded
  TileSpan rows[Config::kGroups];  // of the rows of each warpgroup, within `tiles`
  bool met_non_finite;             // in V of a tile that not all rows see in full; written before its `full`

  /// The tile that is no whole one stands first, where a causal mask leaves the fewest keys.
  __device__ __forceinline__ ForwardF32WorkTile(const Sequence& sequence, int blocks, int block)
      : sequence(sequence),
        end_query(sequence.seqlen_q - (blocks - 1 - block) * Config::kBlockM),
        met_non_finite(false) {
    first_query = max(end_query - Config::kBlockM, 0);
    tiles = span(first_query, end_query);
    for (int g = 0; g < Config::kGroups; ++g) {
      const int first = first_query + g * kWarpgroupRows;
      rows[g] = span(first, min(first + kWarpgroupRows, end_query));
      if (rows[g].begin == rows[g].end) rows[g].begin = rows[g].end = tiles.begin;
    }
  }

 private:
  __device__ __forceinline__ TileSpan span(int first, int end) const {
    return sequence.template key_tiles<Config::kBlockN>(first, end);
  }
};

/// Behind the pieces in shared memory. A barrier's name says what the end of its phase means.
template <class Config>
struct ForwardF32Storage {
  static constexpr int kSlots = 2;
  using WorkTile = ForwardF32WorkTile<Config>;

  uint64_t full[Config::kStages], empty[Config::kStages];
  uint64_t work_tile_full[kSlots], work_tile_empty[kSlots];
  int has_work_tile[kSlots];
  int64_t position;  // of the next work tile in the schedule
  __align__(8) unsigned char work_tile[kSlots][sizeof(WorkTile)];

  __device__ __forceinline__ WorkTile& work_tile_in(int slot) { return *reinterpret_cast<WorkTile*>(work_tile[slot]); }

  /// By one thread.
  __device__ __forceinline__ void init() {
    constexpr int kConsumers = Config::kGroups * kWarpgroupWarps;
    position = blockIdx.x;
    for (int k = 0; k < Config::kStages; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&full[k]), kWarpgroupWarps);
      ptx::mbarrier_init(ptx::shared_address(&empty[k]), kConsumers);
    }
    for (int k = 0; k < kSlots; ++k) {
      ptx::mbarrier_init(ptx::shared_address(&work_tile_full[k]), 1);
      ptx::mbarrier_init(ptx::shared_address(&work_tile_empty[k]), kConsumers + kWarpgroupWarps);
    }
  }
};

/// The work tiles of a CTA, as each of its warps goes through them.
template <class Config>
class ForwardF32Queue : public WorkTileQueue<ForwardF32Storage<Config>> {
  using Base = WorkTileQueue<ForwardF32Storage<Config>>;
  using Base::at_;
  using Base::storage_;

 public:
  using Base::Base;
  using typename Base::WorkTile;

  /// By one thread: the next work tile, or that there is none.
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
