// The warpgroup of the persistent kernel that finds tiles of keys, loads tiles and computes dQ^T, where additions to dQ
// take turns (common/backward/turns.cuh).
#pragma once

#include "producer.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config>
class BackwardPersistentTurnsDq : BackwardPersistentDq<Config> {
  using Base = BackwardPersistentDq<Config>;
  using Base::ds_at_, Base::free_stages_, Base::kBlockM, Base::kPreparing, Base::lane_, Base::loaded_, Base::s_tiles_,
      Base::storage_, Base::tile_, Base::warp_, Base::workspace_;
  using typename Base::DqSlice, typename Base::KeyTile, typename Base::Sum, typename Base::WorkTile;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  friend Base;

  /// A walk over the query tiles that see a key tile: from the last one down, all heads of a tile before the next tile
  /// (QueryTileOrder).
  struct Walk {
    int left = 0, heads = 0;  // steps that are left; heads of the group
    int head = 0, tile = 0;   // counted from the first of the group, and of the sequence
    int first_tile = 0;       // of the first head, in the workspace

    __device__ __forceinline__ void advance() {
      --left;
      if (++head == heads) head = 0, --tile;
    }
  };
  __device__ __forceinline__ static Walk walk_over(const WorkTile& work_tile) {
    const int heads = ptx::uniform(work_tile.heads), last = ptx::uniform(work_tile.tiles.end) - 1;
    return {heads * Base::tiles_of_head(work_tile), heads, 0, last,
            ptx::uniform(static_cast<int>(work_tile.workspace_tile))};
  }
  __device__ __forceinline__ int tile_in_workspace(const Walk& walk) const {
    return walk.first_tile + walk.head * static_cast<int>(workspace_.tiles_per_head) + walk.tile;
  }

  // ---- Loads: of K, Q and lse by the first warp, of V, dO and D by the second

  /// Loads all that there is room for, of this key tile and the next one.
  __device__ __forceinline__ void load_ahead() { Base::load_ahead(*this); }
  __device__ __forceinline__ int steps_to_load() const { return ahead_.left; }
  /// Loads K or V of the next key tile, if there is one. Returns whether it has steps.
  __device__ __forceinline__ bool begin_tile() {
    const uint32_t slot = loaded_.stage();
    if (!Base::begin_tile()) return false;
    ahead_ = walk_over(storage_.work_tiles[slot]);
    first_head_ = this->head_;
    first_row_ = this->row_ - ptx::uniform(storage_.work_tiles[slot].tiles.begin) * kBlockM;
    return true;
  }
  __device__ __forceinline__ void load_step() {
    this->head_ = first_head_ + ahead_.head;
    this->row_ = first_row_ + ahead_.tile * kBlockM;
    this->loads_.term = int64_t{tile_in_workspace(ahead_)} * kBlockM;
    this->load_rows_of_step();
    ahead_.advance();
  }

  // ---- dQ

  /// Adds to dQ^T of all query tiles that see the key tile.
  __device__ __forceinline__ void add_all() {
    const WorkTile& work_tile = storage_.work_tiles[tile_.stage()];
    Walk walk = walk_over(work_tile);
    const int steps = walk.left, first_head = ptx::uniform(work_tile.sequence.head);
    const uint32_t keys = KeyTile::lower_half(s_tiles_ + tile_.stage() * Config::kKeySlotBytes);
#pragma unroll 1
    for (; walk.left > 0; walk.advance()) {
      if (warp_ == kPreparing) this->look_ahead(walk.left, steps);
      wait_for(storage_.ds_full[ds_at_.stage()], ds_at_.parity());
      // When dS is complete, all products of the step before are over.
      ++free_stages_;
      load_ahead();
      const int tile = tile_in_workspace(walk);
      float* const g_target = workspace_.dq + workspace_.dq_of_plane(int64_t{tile} * kBlockM, first_head + walk.head,
                                                                     warp_, kWarpgroupWarps, kBlockM);
      add(keys, g_target, tile * kDqWarps + warp_, work_tile.turn(walk.tile));
      ds_at_.advance();
    }
    // Publishes the tile's last addition: else other CTAs wait for it until the first addition of the next key tile.
    turns_.end(workspace_.turns, lane_);
    if (warp_ == kPreparing && steps == 0) this->look_ahead(0, 0);
  }
  /// Adds K^T dS^T to this warp's 16 columns of dQ^T, at g_target, when its turn has come. The previous turn ends while
  /// the product runs.
  __device__ __forceinline__ void add(uint32_t keys, float* g_target, int slot, int turn) {
    const uint32_t s_slice = DqSlice::slot(s_tiles_, warp_, 0);
    Sum sum;
    Base::start(sum, keys, s_tiles_ + Config::kDsOffset + ds_at_.stage() * Config::kDsBytes);
    turns_.advance(workspace_.turns, slot, turn, lane_);
    DqSlice::finish(sum);
    arrive_as_warp(storage_.ds_empty[ds_at_.stage()], lane_);
    DqSlice::stage(s_slice, sum, lane_);
    turns_.wait(workspace_.turns, turn);
    DqSlice::send(g_target, s_slice, lane_, Config::kDqSliceBytes, turn == 0 && workspace_.first_turns_store);
  }

  Walk ahead_;  // over what is loaded next
  int first_head_ = 0, first_row_ = 0;
  DqTurns<DqAdditions::kBulk> turns_;
};

}  // namespace flash_ext::sm90
