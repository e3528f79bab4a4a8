// The warpgroup of the persistent kernel that finds tiles of keys, loads tiles and computes dQ^T, where a step is made
// of pieces of a block mask's lists (sm90/common/backward/pieces.cuh).
#pragma once

#include "producer.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config>
class BackwardPersistentBlocksDq : BackwardPersistentDq<Config> {
  using Base = BackwardPersistentDq<Config>;
  using Base::ds_at_, Base::free_stages_, Base::head_, Base::batch_, Base::kBlockM, Base::kPreparing, Base::lane_,
      Base::loaded_, Base::maps_, Base::s_tiles_, Base::stage_, Base::storage_, Base::tile_, Base::warp_,
      Base::workspace_;
  using typename Base::DqSlice, typename Base::KeyTile, typename Base::Sum, typename Base::WorkTile;
  static constexpr int kPieces = Config::kPieces;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() { Base::run(*this); }

 private:
  friend Base;

  // ---- Loads: of K, Q and lse by the first warp, of V, dO and D by the second

  /// Loads all that there is room for, of this key tile and the next one. The list of the next one is read a step
  /// before its first rows are loaded.
  __device__ __forceinline__ void load_ahead() {
    if (warp_ > 1) return;
#pragma unroll 1
    for (;; --free_stages_) {
      if (left_ == 0 && !begin_tile()) return;
      if (free_stages_ == 0) return;
      load_step();
    }
  }
  /// Loads K or V of the next key tile, unless there is none or it is two ahead, and reads the first entries of its
  /// list. Returns whether it has steps.
  __device__ __forceinline__ bool begin_tile() {
    if (loaded_.count > tile_.count + 1 || !this->has_tile(loaded_)) return false;
    const uint32_t slot = loaded_.stage();
    const WorkTile& work_tile = storage_.work_tiles[slot];
    left_ = ptx::uniform(work_tile.tiles.end);
    head_ = ptx::uniform(work_tile.sequence.head);
    batch_ = ptx::uniform(work_tile.sequence.batch);
    first_piece_ = ptx::uniform(static_cast<int>(work_tile.workspace_tile)) * kPieces;
    const bool always_hides = work_tile.large || work_tile.first_key + Config::kBlockN > work_tile.sequence.seqlen_k;
    flags_ = ptx::uniform(always_hides ? kPiecesHide : 0);
    g_entry_ = work_tile.steps + lane_;
    read_entry();
    this->load_keys_of(work_tile, slot);
    loaded_.advance();
    return left_ > 0;
  }
  /// Reads the next entries of the list: a piece each in lanes 0, 1, ..
  __device__ __forceinline__ void read_entry() {
    entry_ = lane_ < min(left_, kPieces) ? __ldg(reinterpret_cast<const int4*>(g_entry_))
                                         : int4{0, BackwardPiece::kAbsent, -1, -1};
    g_entry_ += kPieces;
  }
  __device__ __forceinline__ void load_step() {
    if (warp_ == 0) {
      write_metadata();
      load_pieces(maps_.q, storage_.q_full, Config::kQueriesOffset, workspace_.lse, storage_.lse);
    } else {
      load_pieces(maps_.grad_out, storage_.do_full, Config::kGradsOffset, workspace_.minus_delta, storage_.minus_delta);
    }
    if (++stage_ == Config::kStages) stage_ = 0;
    left_ = max(left_ - kPieces, 0);
    read_entry();
  }
  __device__ __forceinline__ int pieces_of_head() const {
    return static_cast<int>(workspace_.tiles_per_head) * kPieces;
  }

  /// There are kMetadataSlots slots, as for steps that a warp finds (steps.cuh): the metadata of step m + 2 is written,
  /// to the slot of step m - 2, when dS of step m is complete. All have read that slot by then: dQ's warps before they
  /// released dS of m - 2, for which consumers waited before they stored dS of m; consumers before dS of m - 2 was
  /// complete. Steps, stages and slots go on from one key tile to the next, so this also holds between tiles. After the
  /// last step of a tile consumers read flags of the next slot, which may be written meanwhile, and use them for
  /// nothing. Rows past the last query hide nothing: they are loaded as zeros, and their terms make weights of 0.
  __device__ __forceinline__ void write_metadata() {
    const int head = entry_.x, tile = entry_.y;
    int flags = flags_;
    if (__any_sync(~0u, (entry_.z & entry_.w) >= 0)) flags |= kPiecesHide | kPiecesAreMasked;
    // A head's planes of dQ^T follow each other.
    const int dq = tile < 0 ? BackwardPiece::kAbsent : head * kDqPlanes * pieces_of_head() + tile;
    if (lane_ < kPieces)
      *reinterpret_cast<int4*>(&storage_.step_metadata[slot_].pieces[lane_]) = make_int4(tile, dq, entry_.z, entry_.w);
    if (lane_ == 0) storage_.step_flags[slot_] = flags;
    __syncwarp();
    slot_ = (slot_ + 1) % kMetadataSlots;
  }

  /// Loads the pieces of a step: Q with lse, or dO with D. An absent piece is loaded from rows that do not exist, so
  /// that it is made of zeros; its terms are any.
  __device__ __forceinline__ void load_pieces(const CUtensorMap& map, const uint64_t (&full)[Config::kStages],
                                              int tiles_offset, const float* g_terms,
                                              const float (&terms)[Config::kStages][kBlockM]) const {
    const uint32_t s_full = address(full[0]) + stage_ * sizeof(uint64_t);
    const uint32_t s_rows = s_tiles_ + tiles_offset + stage_ * Config::kQueryBytes;
    const uint32_t s_terms = ptx::shared_address(terms) + stage_ * Config::kTermBytes;
    const int head = head_ + entry_.x, row = entry_.y * kPieceQueries;
    const int in_workspace = first_piece_ + entry_.x * pieces_of_head() + max(entry_.y, 0);
    int heads[kPieces], rows[kPieces], pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      heads[k] = __shfl_sync(~0u, head, k);
      rows[k] = __shfl_sync(~0u, row, k);
      pieces[k] = __shfl_sync(~0u, in_workspace, k);
    }
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        load_panels(map, s_full, s_rows + k * Config::kPieceBytes, kPieceQueries, 0, 1, rows[k], heads[k], batch_);
        ptx::bulk_load(s_terms + k * Config::kPieceTermBytes, g_terms + int64_t{pieces[k]} * kPieceQueries,
                       Config::kPieceTermBytes, s_full);
      }
    }
    __syncwarp();
  }

  // ---- dQ

  static constexpr int kDqPlanes = kWarpgroupWarps;

  /// Adds to dQ^T of all pieces that see the key tile.
  __device__ __forceinline__ void add_all() {
    const WorkTile& work_tile = storage_.work_tiles[tile_.stage()];
    const int steps = BackwardPieceSteps<Config>::steps_of(ptx::uniform(work_tile.tiles.end));
    const uint32_t keys = KeyTile::lower_half(s_tiles_ + tile_.stage() * Config::kKeySlotBytes);
    float* const g_dq =
        workspace_.dq + workspace_.dq_of_plane(ptx::uniform(work_tile.workspace_tile) * kBlockM,
                                               ptx::uniform(work_tile.sequence.head), warp_, kDqPlanes, kBlockM);
#pragma unroll 1
    for (int left = steps; left > 0; --left) {
      if (warp_ == kPreparing) this->look_ahead(left, steps);
      wait_for(storage_.ds_full[ds_at_.stage()], ds_at_.parity());
      // When dS is complete, all products of the step before are over.
      ++free_stages_;
      load_ahead();
      if (workspace_.dq) {
        add(keys, g_dq);
      } else {
        arrive_as_warp(storage_.ds_empty[ds_at_.stage()], lane_);
      }
      ds_at_.advance();
    }
    if (warp_ == kPreparing && steps == 0) this->look_ahead(0, 0);
  }
  /// Adds K^T dS^T to this warp's 16 columns of dQ^T. g_dq: where this plane begins, for the first query of the group's
  /// first head.
  __device__ __forceinline__ void add(uint32_t keys, float* g_dq) const {
    const uint32_t s_sums = DqSlice::slot(s_tiles_, warp_, 0);
    Sum sum;
    Base::start(sum, keys, s_tiles_ + Config::kDsOffset + ds_at_.stage() * Config::kDsBytes);
    int dq_pieces[kPieces];
#pragma unroll
    for (int k = 0; k < kPieces; ++k)
      dq_pieces[k] = ptx::uniform(storage_.step_metadata[ds_at_.count % kMetadataSlots].pieces[k].dq);
    DqSlice::finish(sum);
    arrive_as_warp(storage_.ds_empty[ds_at_.stage()], lane_);
    DqSlice::stage(s_sums, sum, lane_);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      constexpr int kBytes = Config::kDqOfPiece * 4;
#pragma unroll
      for (int k = 0; k < kPieces; ++k)
        if (dq_pieces[k] >= 0)
          ptx::bulk_reduce_add(g_dq + int64_t{dq_pieces[k]} * Config::kDqOfPiece, s_sums + k * kBytes, kBytes);
      ptx::bulk_commit();
    }
    __syncwarp();
  }

  // The list that is read next: the pieces that are left, and this lane's entry.
  int left_ = 0;
  const ListedQueries* g_entry_ = nullptr;
  int4 entry_ = {};
  int first_piece_ = 0;  // in the workspace, of the group's first head
  int flags_ = 0;        // of all steps of the tile of keys
  uint32_t slot_ = 0;
};

}  // namespace flash_ext::sm90
