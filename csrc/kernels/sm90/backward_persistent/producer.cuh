// The warpgroup of the persistent kernel that finds the key tiles to work on, loads tiles ahead of the consumers, also
// those of the next key tile, and computes dQ^T = K^T dS^T and adds it to memory.
#pragma once

#include "kernels/ptx/uniform.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/backward/producer.cuh"
#include "scheduler.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup. Key tiles are counted from the first of the CTA.
template <class Config>
class BackwardPersistentDq {
 public:
  using Element = typename Config::Element;
  using Storage = BackwardPersistentStorageOf<Config>;
  using WorkTile = BackwardWorkTile<Config>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  __device__ __forceinline__ BackwardPersistentDq(const BackwardParams& p, const BackwardMaps& maps,
                                                  const BackwardWorkspace& workspace,
                                                  const BackwardTileTable<Config>& table, Storage& storage,
                                                  uint32_t s_tiles, int warp, int lane)
      : p_(p),
        maps_(maps),
        workspace_(workspace),
        table_(table),
        storage_(storage),
        warp_(warp),
        lane_(lane),
        s_tiles_(s_tiles) {}

  __device__ __forceinline__ void run() { run(*this); }

 protected:
  /// run() for a derived class: `self` has load_ahead() and add_all().
  template <class Self>
  __device__ __forceinline__ static void run(Self& self) {
    ptx::wait_for_previous_grid();  // for the table, row terms, zeroed sums and counters
    if (self.warp_ == kPreparing) {
      if (kTakesTurns) self.take();
      self.fetch(), self.publish();
    }
#pragma unroll 1
    for (; self.has_tile(self.tile_); self.tile_.advance()) {
      self.load_ahead();
      self.add_all();
      arrive_as_warp(self.storage_.tile_empty[self.tile_.stage()], self.lane_);
    }
    if (self.lane_ == 0) ptx::bulk_wait();
  }

  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = HalfPanelDescriptor<kBlockN>;
  using DqSlice = BackwardDqSlice<Config>;
  using Sum = typename DqSlice::Sum;
  using TileCount = RingCount<Config::kKeySlots>;
  static constexpr int kPreparing = 3;  // the warp that finds tiles of keys
  static constexpr int kTileWords = sizeof(WorkTile) / sizeof(uint2);
  static constexpr int kShareWords = Config::kZeroesDq ? sizeof(DqShare) / sizeof(uint2) : 0;
  static constexpr int kWords = kTileWords + kShareWords;
  static_assert(sizeof(WorkTile) % sizeof(uint2) == 0 && sizeof(DqShare) % sizeof(uint2) == 0);
  static_assert(kWords <= 32, "a lane copies a word");
  static constexpr bool kTakesTurns = Config::kTurns == TurnTaking::kAlways;
  // Steps before the end of a tile of keys at which the next one is taken, fetched and published: memory answers
  // meanwhile. The first loads of that tile are two steps before the end.
  static constexpr int kTaken = 6, kFetched = 5, kPublished = 4;
  static constexpr int kDqBytesOfQuery = Config::kDqSliceBytes / kBlockM;

  __device__ __forceinline__ bool has_tile(const TileCount& tile) const {
    wait_for(storage_.tile_full[tile.stage()], tile.parity());
    return ptx::uniform(storage_.work_tiles[tile.stage()].heads) != kNoMoreTiles;
  }

  /// A walk over the query tiles that see a key tile, one head after another. Where few queries of a head's last tile
  /// are computed, the last tiles of all heads come at the end (BackwardPipelinedSteps).
  struct Walk {
    int left = 0, left_of_head = 0;  // steps
    int tails = 0;                   // steps of last tiles
    int head = 0;                    // counted from the first of the group
    int64_t term = 0;                // of the tile's first query, in the workspace

    /// Moves on by a tile. Returns whether the next tile follows this one directly.
    __device__ __forceinline__ bool advance() {
      --left;
      term += kBlockM;
      return --left_of_head > 0;
    }
  };
  __device__ __forceinline__ static int tiles_of_head(const WorkTile& work_tile) {
    return ptx::uniform(work_tile.tiles.end - work_tile.tiles.begin);
  }
  __device__ __forceinline__ static bool has_tail(const WorkTile& work_tile) {
    return Config::kHasTails && ptx::uniform(work_tile.tail_queries) > 0;
  }
  /// The term of the first head's first tile.
  __device__ __forceinline__ static int64_t first_term(const WorkTile& work_tile) {
    return ptx::uniform(work_tile.workspace_tile + work_tile.tiles.begin) * kBlockM + ptx::uniform(work_tile.skipped);
  }
  __device__ __forceinline__ static Walk walk_over(const WorkTile& work_tile) {
    const int of_head = tiles_of_head(work_tile), heads = ptx::uniform(work_tile.heads);
    const bool tail = has_tail(work_tile);
    return {heads * of_head, tail ? max(of_head - 1, 1) : of_head, tail ? heads : 0, 0, first_term(work_tile)};
  }
  /// Moves to the next tile where it does not follow the last one. Returns its number, counted from tiles.begin.
  __device__ __forceinline__ int begin_head(Walk& walk, const WorkTile& work_tile) const {
    const int without_tail = tiles_of_head(work_tile) - (walk.tails > 0);
    const bool of_tails = Config::kHasTails && walk.left <= walk.tails;
    walk.head = Config::kHasTails && walk.left == walk.tails ? 0 : walk.head + 1;
    walk.left_of_head = of_tails ? 1 : without_tail;
    const int tile = of_tails ? without_tail : 0;
    walk.term = first_term(work_tile) + (walk.head * workspace_.tiles_per_head + tile) * kBlockM;
    return tile;
  }

  // ---- The next tile of keys, by one warp

  /// Prepares the next key tile when `left` of the current tile's `steps` steps are left. It tests nothing else: ptxas
  /// must see that all lanes take the same branches.
  __device__ __forceinline__ void look_ahead(int left, int steps) {
    if (left == min(steps, kTaken)) take();
    if (left == min(steps, kFetched)) fetch();
    if (left == min(steps, kPublished)) publish();
  }
  /// Takes a position. A CTA has its first one without asking, unless turns are taken (common/backward/turns.cuh).
  __device__ __forceinline__ void take() {
    if (lane_ == 0) taken_ = (kTakesTurns ? 0 : gridDim.x) + atomicAdd(table_.taken, 1u);
  }
  /// Issues the loads of the work tile at this position and of its share, one word per lane.
  __device__ __forceinline__ void fetch() {
    position_ = ptx::uniform(taken_);
    if constexpr (Config::kListsBlocks) any_large_ = *table_.any_large;
    if (position_ < table_.count && lane_ < kWords)
      word_ = *word_of_lane(table_.tiles + position_, table_.shares + position_);
  }
  /// The word that this lane copies, of a work tile and its share.
  __device__ __forceinline__ uint2* word_of_lane(WorkTile* work_tile, DqShare* share) const {
    if (lane_ < kTileWords) return reinterpret_cast<uint2*>(work_tile) + lane_;
    return reinterpret_cast<uint2*>(share) + (lane_ - kTileWords);
  }
  __device__ __forceinline__ void publish() {
    const uint32_t slot = published_.stage();
    WorkTile& work_tile = storage_.work_tiles[slot];
    wait_for(storage_.tile_empty[slot], published_.parity() ^ 1);
    DqShare* s_share = nullptr;
    if constexpr (Config::kZeroesDq) s_share = storage_.zeroing.shares + slot;
    if (lane_ < kWords) *word_of_lane(&work_tile, s_share) = word_;
    __syncwarp();
    if (position_ < table_.count) {
      if constexpr (Config::kListsBlocks) {
        if (ptx::uniform(any_large_) != 0) find_large_lse_of_list(workspace_, work_tile, lane_);
      } else {
        find_large_lse_of_all(workspace_, work_tile, lane_);
      }
      if constexpr (Config::kZeroesDq)
        storage_.zeroing.dq_is_zeroed[slot] =
            BackwardPersistentDqZeroing<Config>::is_zeroed(workspace_, work_tile.sequence);
      if constexpr (Config::may_have(kStepKeyBiased))
        find_visible_keys(p_, workspace_, work_tile, storage_.visible_keys[slot], lane_);
    } else {
      work_tile.heads = kNoMoreTiles;
    }
    arrive_as_warp(storage_.tile_full[slot], lane_);
    published_.advance();
  }

  // ---- Loads: of K, Q and lse by the first warp, of V, dO and D by the second

  /// Loads all that there is room for, of this key tile and the next one.
  __device__ __forceinline__ void load_ahead() { load_ahead(*this); }
  /// The same for a derived class: `self` has steps_to_load(), begin_tile() and load_step().
  template <class Self>
  __device__ __forceinline__ static void load_ahead(Self& self) {
    if (self.warp_ > 1) return;
#pragma unroll 1
    for (; self.free_stages_ > 0; --self.free_stages_) {
      if (self.steps_to_load() == 0 && !(self.loaded_.count <= self.tile_.count + 1 && self.begin_tile())) return;
      self.load_step();
    }
  }
  /// How many steps are left to load of the key tile that was begun last.
  __device__ __forceinline__ int steps_to_load() const { return loads_.left; }
  /// Loads K or V of the next key tile, if there is one. Returns whether it has steps.
  __device__ __forceinline__ bool begin_tile() {
    const uint32_t slot = loaded_.stage();
    if (!has_tile(loaded_)) return false;
    const WorkTile& work_tile = storage_.work_tiles[slot];
    loads_ = walk_over(work_tile);
    head_ = ptx::uniform(work_tile.sequence.head);
    row_ = first_row(work_tile);
    batch_ = p_.seq.cu_seqlens_q ? 0 : ptx::uniform(work_tile.sequence.batch);
    load_keys_of(work_tile, slot);
    loaded_.advance();
    return loads_.left > 0;
  }
  __device__ __forceinline__ static int first_row(const WorkTile& work_tile) {
    return ptx::uniform(static_cast<int>(work_tile.sequence.q_begin) + work_tile.tiles.begin * kBlockM);
  }
  /// Loads K or V: the first warp K, the second V.
  __device__ __forceinline__ void load_keys_of(const WorkTile& work_tile, uint32_t slot) const {
    if (lane_ == 0) {
      const uint32_t s_slot = s_tiles_ + slot * Config::kKeySlotBytes;
      if (warp_ == 0) {
        load_keys<Config>(p_, maps_.k, storage_.k_full[slot], s_slot, work_tile.sequence, work_tile.first_key, 0, 1);
      } else {
        load_keys<Config>(p_, maps_.v, storage_.v_full[slot], s_slot + Config::kValuesOffset, work_tile.sequence,
                          work_tile.first_key, 0, 1);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_rows_of_step() {
    if (warp_ == 0) {
      load_rows(maps_.q, storage_.q_full, Config::kQueriesOffset, workspace_.lse, storage_.lse);
    } else {
      load_rows(maps_.grad_out, storage_.do_full, Config::kGradsOffset, workspace_.minus_delta, storage_.minus_delta);
    }
    if (++stage_ == Config::kStages) stage_ = 0;
  }
  __device__ __forceinline__ void load_step() {
    load_rows_of_step();
    row_ += kBlockM;
    if (loads_.advance()) return;
    // The key tile is the last one that was begun.
    const WorkTile& work_tile = storage_.work_tiles[loaded_.stage() ^ 1];
    row_ = first_row(work_tile) + begin_head(loads_, work_tile) * kBlockM;
    head_ = ptx::uniform(work_tile.sequence.head) + loads_.head;
  }
  /// Loads a tile of Q with its lse, or of dO with its D.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, const uint64_t (&full)[Config::kStages],
                                            int tiles_offset, const float* g_terms,
                                            const float (&terms)[Config::kStages][kBlockM]) const {
    const uint32_t s_full = address(full[0]) + stage_ * sizeof(uint64_t);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load_panels(map, s_full, s_tiles_ + tiles_offset + stage_ * Config::kQueryBytes, kBlockM, 0, 1, row_, head_,
                  batch_);
      ptx::bulk_load(ptx::shared_address(terms) + stage_ * Config::kTermBytes, g_terms + loads_.term,
                     Config::kTermBytes, s_full);
    }
    __syncwarp();
  }

  // ---- dQ

  /// Zeroes the share that the table has for this position, by the warps that load nothing, while dS of its first step
  /// is still being computed. Waits until the sums that the tile adds to have been zeroed: mostly they should have been
  /// when the tile was published, some steps ago. Warp 3 saw that; each warp needs a fence of its own.
  __device__ __forceinline__ void zero_dq() {
    using Zeroing = BackwardPersistentDqZeroing<Config>;
    const uint32_t slot = tile_.stage();
    const DqShare& share = storage_.zeroing.shares[slot];
    const int chunks = ptx::uniform(share.chunks);
    if (warp_ >= Config::kLoadingWarps && chunks >= 0) {
      Zeroing::zero(workspace_, ptx::uniform(share.first_row), chunks, warp_ - Config::kLoadingWarps, lane_);
      zeroed_head_ = ptx::uniform(share.key_head);
    }
    if (ptx::uniform(static_cast<int>(storage_.zeroing.dq_is_zeroed[slot]))) return ptx::fence_proxy_async_global();
    publish_zeroed();
    Zeroing::wait(workspace_, storage_.work_tiles[slot].sequence);
  }
  /// Publishes the zeroed share, once. After the first step its stores are over, so that the release waits little; it
  /// is published earlier only if this tile must wait, and later only if it has no steps.
  __device__ __forceinline__ void publish_zeroed() {
    if (zeroed_head_ < 0) return;
    BackwardPersistentDqZeroing<Config>::publish(workspace_, zeroed_head_, lane_);
    zeroed_head_ = -1;
  }

  /// Adds to dQ^T of all query tiles that see the key tile.
  __device__ __forceinline__ void add_all() {
    const WorkTile& work_tile = storage_.work_tiles[tile_.stage()];
    Walk walk = walk_over(work_tile);
    const int steps = walk.left;
    const int first_head = ptx::uniform(work_tile.sequence.head);
    const int tail_bytes = ptx::uniform(work_tile.tail_queries) * kDqBytesOfQuery;
    const uint32_t keys = KeyTile::lower_half(s_tiles_ + tile_.stage() * Config::kKeySlotBytes);
    if constexpr (Config::kZeroesDq) zero_dq();
#pragma unroll 1
    while (walk.left > 0) {
      if (warp_ == kPreparing) look_ahead(walk.left, steps);
      wait_for(storage_.ds_full[ds_at_.stage()], ds_at_.parity());
      // When dS is complete, all products of the step before are over.
      ++free_stages_;
      load_ahead();
      if (workspace_.dq) {
        add(keys,
            workspace_.dq + workspace_.dq_of_plane(walk.term, first_head + walk.head, warp_, kWarpgroupWarps, kBlockM),
            walk.left > walk.tails ? Config::kDqSliceBytes : tail_bytes);
      } else {
        arrive_as_warp(storage_.ds_empty[ds_at_.stage()], lane_);
      }
      ds_at_.advance();
      if constexpr (Config::kZeroesDq) publish_zeroed();
      if (!walk.advance()) begin_head(walk, work_tile);
    }
    if constexpr (Config::kZeroesDq) publish_zeroed();
    if (warp_ == kPreparing && steps == 0) look_ahead(0, 0);
  }
  /// Adds `bytes` bytes of K^T dS^T to this warp's 16 columns of dQ^T, at g_target. Queries of a tile past the
  /// computed ones are multiplied too, but not added.
  __device__ __forceinline__ void add(uint32_t keys, float* g_target, int bytes) const {
    const uint32_t s_slice = DqSlice::slot(s_tiles_, warp_, 0);
    Sum sum;
    start(sum, keys, s_tiles_ + Config::kDsOffset + ds_at_.stage() * Config::kDsBytes);
    DqSlice::finish(sum);
    arrive_as_warp(storage_.ds_empty[ds_at_.stage()], lane_);
    DqSlice::stage(s_slice, sum, lane_);
    DqSlice::send(g_target, s_slice, lane_, bytes);
  }
  __device__ __forceinline__ static void start(Sum& sum, uint32_t keys, uint32_t s_ds) {
    using Product = ptx::Wgmma<Element, kBlockM>;
    ptx::wgmma_fence();
    const uint32_t ds = DsTile::lower_half(s_ds);
    Product::template multiply<false, ptx::Major::kMN, ptx::Major::kMN>(sum, KeyTile::at(keys, 0), DsTile::at(ds, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      Product::template multiply<true, ptx::Major::kMN, ptx::Major::kMN>(sum, KeyTile::at(keys, KeyTile::down_rows(k)),
                                                                         DsTile::at(ds, DsTile::down_rows(k)));
    ptx::wgmma_commit();
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const BackwardWorkspace& workspace_;
  const BackwardTileTable<Config>& table_;
  Storage& storage_;
  const int warp_, lane_;
  const uint32_t s_tiles_;
  TileCount tile_, published_, loaded_;
  // The key tile that is published next.
  uint32_t taken_ = blockIdx.x, position_ = 0;
  uint2 word_ = {};  // of the work tile or its share, one per lane
  uint32_t any_large_ = 0;
  int32_t zeroed_head_ = -1;  // whose share is zeroed and not yet published
  RingCount<Config::kDsStages> ds_at_;
  // What is loaded next.
  int free_stages_ = Config::kStages - 1;
  Walk loads_;
  int row_ = 0, head_ = 0, batch_ = 0;
  uint32_t stage_ = 0;
};

}  // namespace flash_ext::sm90
