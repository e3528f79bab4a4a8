// The warpgroup that loads tiles, into three stages of Q and as many of dO (two with a bias of pairs), and computes dQ
// and adds it to memory.
#pragma once

#include "kernels/common/backward/dq_completion.cuh"
#include "kernels/common/backward/dq_zeroing.cuh"
#include "kernels/ptx/uniform.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/sm90/common/backward/producer.cuh"
#include "kernels/sm90/common/backward/steps.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of this warpgroup.
template <class Config, class Storage_ = BackwardPipelinedStorage<Config>>
class BackwardPipelinedDq : protected BackwardDqWarp<Config, Storage_> {
 public:
  using Base = BackwardDqWarp<Config, Storage_>;
  using Element = typename Config::Element;
  using Storage = Storage_;
  using Steps = BackwardStepsOf<Config>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;

  __device__ __forceinline__ BackwardPipelinedDq(const BackwardParams& p, const BackwardMaps& maps,
                                                 const BackwardWorkspace& workspace, Storage& storage, uint32_t s_tiles,
                                                 int warp, int lane)
      : Base(p, maps, workspace, storage, s_tiles, warp, lane),
        keys_(KeyTile::lower_half(s_tiles)),
        ds_(DsTile::lower_half(s_tiles + Config::kDsOffset)),
        first_row_(ptx::uniform(static_cast<int>(work_tile_.sequence.q_begin))),
        batch_(p.seq.cu_seqlens_q ? 0 : ptx::uniform(work_tile_.sequence.batch)),
        first_tile_(ptx::uniform(work_tile_.workspace_tile - work_tile_.sequence.head * workspace.tiles_per_head)) {}

  __device__ __forceinline__ void run() { run(*this); }

 protected:
  static constexpr int kQueryWarp = 0, kGradWarp = 1;  // the warps that load
  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = TileDescriptor<kBlockN>;
  using DqZeroing = flash_ext::DqZeroing<kBlockM, Config::kDqHeadDim, 1, kWarpgroupWarps - Config::kLoadingWarps>;
  using Base::kPanels, Base::lane_, Base::maps_, Base::s_tiles_, Base::storage_, Base::warp_, Base::work_tile_,
      Base::workspace_;
  using typename Base::Sum;

  /// run() for a derived class: `self` has load_and_add().
  template <class Self>
  __device__ __forceinline__ static void run(Self& self) {
    if constexpr (Config::kZeroesDq) self.zero_dq();
    if (self.work_tile_.tiles.begin < self.work_tile_.tiles.end) {
      self.load_and_add();
    } else if constexpr (Config::kSkipsTurns) {
      if (self.storage_.skips_turns) self.skip_turns();
    } else if constexpr (Config::kZeroesDq) {
      // Sums that are reported complete have been zeroed, also if no CTA of the head has a step.
      DqZeroing::wait(self.workspace_, self.work_tile_.sequence);
    }
    if constexpr (Config::kZeroesDq) {
      if (self.workspace_.completion.is_used())
        return DqCompletion::finish_warp(self.p_, self.workspace_, self.work_tile_.sequence, self.lane_);
    }
    // Shared memory must live until it has been read. The next kernel waits for the grid, and so for what was read.
    if (self.lane_ == 0) ptx::bulk_wait_read<0>();
  }

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Loads loads{step, first_term(step)};
    load_keys_and_values();
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) {
      load(loads);
      advance(loads);
    }
    if constexpr (Config::kZeroesDq) DqZeroing::wait(workspace_, work_tile_.sequence);
#pragma unroll 1
    for (; !step.is_past_end(); step.advance()) {
      wait_for(storage_.ds_full[at_.stage()], at_.parity());
      // When dS is complete, all products of the step before are over.
      load(loads);
      if (workspace_.dq) {
        add(step);
      } else {
        this->release(storage_.ds_empty[at_.stage()]);
      }
      at_.advance();
      advance(loads);
    }
    send();
    turns_.end(workspace_.turns, lane_);
  }

  /// The loop over all steps for a derived class: `self` has query_tile(step), the query tile of a step; load(next);
  /// and load_early(step, next), called before dS of the step is complete.
  template <class Self, class Next>
  __device__ __forceinline__ static void add_all(Self& self, Steps& step, Next& next) {
    if constexpr (Config::kZeroesDq) DqZeroing::wait(self.workspace_, self.work_tile_.sequence);
#pragma unroll 1
    for (; !step.is_past_end(); step.advance()) {
      self.load_early(step, next);
      wait_for(self.storage_.ds_full[self.at_.stage()], self.at_.parity());
      const auto& queries = self.query_tile(step);
      self.load(next);
      if (self.workspace_.dq) {
        self.add(queries);
      } else {
        self.release(self.storage_.ds_empty[self.at_.stage()]);
      }
      self.at_.advance();
    }
    self.send();
    if constexpr (Config::kTurns != TurnTaking::kNever) self.turns_.end(self.workspace_.turns, self.lane_);
  }

  /// Loads what can be loaded before dS of a step is complete: nothing here.
  template <class Next>
  __device__ __forceinline__ static void load_early(const Steps&, const Next&) {}

  // ---- Loads: of K, Q and lse by kQueryWarp, of V, dO and D by kGradWarp

  /// A query tile. `head` counts all query heads.
  struct QueryTile {
    int head, tile;
  };
  struct LoadedStep : QueryTile {
    uint32_t stage;
  };
  struct LoadedTile {
    LoadedStep step;
    int64_t first_term;
  };

  /// The step whose Q and dO are loaded next, and where its row terms begin.
  struct Loads {
    Steps step;
    int64_t first_term;
  };

  __device__ __forceinline__ void advance(Loads& loads) const {
    loads.step.advance();
    const bool is_next = !loads.step.takes_turns() && loads.step.tile != loads.step.first;
    loads.first_term = is_next ? loads.first_term + int64_t{kBlockM} : first_term(loads.step);
  }
  __device__ __forceinline__ void load_keys_and_values() const {
    if (warp_ == kQueryWarp) this->load_keys(maps_.k, storage_.k_full, 0);
    if (warp_ == kGradWarp) this->load_keys(maps_.v, storage_.v_full, Config::kValuesOffset);
  }
  __device__ __forceinline__ void load(const Loads& loads) const {
    if (warp_ > kGradWarp || loads.step.is_past_end()) return;
    warp_ == kQueryWarp ? load_queries(loads) : load_grads(loads);
  }
  /// Loads a tile of Q with its lse, or of dO with its D. `tile` is as LoadedTile.
  template <class Tile>
  __device__ __forceinline__ void load_queries(const Tile& tile) const {
    load_rows(maps_.q, storage_.q_full, Config::kQueriesOffset, workspace_.lse, storage_.lse, tile);
  }
  template <class Tile>
  __device__ __forceinline__ void load_grads(const Tile& tile) const {
    load_rows(maps_.grad_out, storage_.do_full, Config::kGradsOffset, workspace_.minus_delta, storage_.minus_delta,
              tile);
  }
  template <class Tile>
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, const uint64_t (&full)[Config::kStages],
                                            int tiles_offset, const float* g_terms,
                                            const float (&terms)[Config::kStages][kBlockM], const Tile& tile) const {
    const uint32_t stage = tile.step.stage, s_full = address(full[0]) + stage * sizeof(uint64_t);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load_panels(map, s_full, s_tiles_ + tiles_offset + stage * Config::kQueryBytes, kBlockM, 0, kPanels,
                  first_row_ + tile.step.tile * kBlockM, tile.step.head, batch_);
      ptx::bulk_load(ptx::shared_address(terms) + stage * Config::kTermBytes, g_terms + tile.first_term,
                     Config::kTermBytes, s_full);
    }
    __syncwarp();
  }
  template <class Step>
  __device__ __forceinline__ int64_t first_term(const Step& step) const {
    return (first_tile_ + step.head * workspace_.tiles_per_head + step.tile) * kBlockM;
  }

  // ---- dQ

  /// Zeroes sums of dQ of later CTAs, by the warps that load nothing: so no load is delayed.
  __device__ __forceinline__ void zero_dq() const {
    if (workspace_.zeroing.is_used() && warp_ >= Config::kLoadingWarps)
      DqZeroing::zero_share_of(Base::p_, workspace_, blockIdx.x, warp_ - Config::kLoadingWarps, lane_);
  }

  /// dQ += dS K
  template <class Step>
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t ds = ds_ + at_.stage() * (Config::kDsBytes / 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      Sum sum;
      start(sum, ds, keys_ + panel * (panel_bytes(kBlockN) / 16));
      // Ending the previous turn waits until its additions are in memory: it does so while this product runs.
      if constexpr (Config::kTurns != TurnTaking::kNever) {
        if (panel == 1) wait_for_turn(step);
      }
      send();
      this->finish(sum);
      if (panel + 1 == kPanels) this->release(storage_.ds_empty[at_.stage()]);
      this->stage(sum, panel);
      g_target_ = dq_slice(step, panel);
      s_source_ = this->s_slice(panel);
    }
  }

  /// Starts the product for 64 columns of dQ.
  __device__ __forceinline__ static void start(Sum& sum, uint32_t ds, uint32_t keys) {
    using Product = ptx::Wgmma<Element, kPanelColumns>;
    ptx::wgmma_fence();
    Product::template multiply<false, ptx::Major::kMN, ptx::Major::kMN>(sum, DsTile::at(ds, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      Product::template multiply<true, ptx::Major::kMN, ptx::Major::kMN>(sum, DsTile::at(ds, DsTile::down_rows(k)),
                                                                         KeyTile::at(keys, KeyTile::down_rows(k)));
    ptx::wgmma_commit();
  }
  /// Adds the panel that was staged last, if there is one, to memory.
  __device__ __forceinline__ void send() {
    if (!g_target_) return;
    Base::DqSlice::send(g_target_, s_source_, lane_, Config::kDqSliceBytes, stores_);
  }
  /// Waits for this warp's turn at a tile, before its first panel is sent. The turn of the step before, whose last
  /// panel was sent half a step ago, ends first.
  __device__ __forceinline__ void wait_for_turn(const Steps& step) {
    static_assert(kPanels == 2);
    if (Config::kTurns == TurnTaking::kIfAsked && !workspace_.turns) return;
    const int turn = work_tile_.turn(step.tile);
    turns_.advance(workspace_.turns, slot_of(step), turn, lane_);
    turns_.wait(workspace_.turns, turn);
    stores_ = turn == 0 && workspace_.first_turns_store;
  }
  /// Passes the turns of a CTA whose keys are hidden from all queries: it has no steps, but later CTAs wait for its
  /// turns. Each lane passes every 32nd turn, each of another query tile or head, and waits for no other lane.
  __device__ __forceinline__ void skip_turns() const {
    const int heads = work_tile_.heads, tiles = work_tile_.order.first - work_tile_.order.past;
    int next = lane_;
#pragma unroll 1
    while (__any_sync(~0u, next < tiles * heads)) {
      if (next < tiles * heads) {
        const QueryTile queries{work_tile_.sequence.head + next % heads, work_tile_.order.first - next / heads};
        if (turns_.skip(workspace_.turns, slot_of(queries), work_tile_.turn(queries.tile))) next += 32;
      }
    }
  }
  /// This warp's counter of additions to a tile.
  template <class Step>
  __device__ __forceinline__ int slot_of(const Step& step) const {
    return static_cast<int>(first_term(step) / kBlockM) * kDqWarps + warp_;
  }
  /// Where dQ of this warp's 16 queries begins, for a panel's 64 columns.
  template <class Step>
  __device__ __forceinline__ float* dq_slice(const Step& step, int panel) const {
    return workspace_.dq + (first_term(step) + warp_ * 16) * Config::kHeadDim + panel * (16 * kPanelColumns);
  }

  const uint32_t keys_, ds_;  // lower halves of descriptors
  const int first_row_, batch_;
  const int64_t first_tile_;  // of head 0 in the workspace
  RingCount<Config::kDsStages> at_;
  bool stores_ = false;        // whether panels of the tile whose turn has come overwrite memory
  float* g_target_ = nullptr;  // where the panel that was staged last goes
  uint32_t s_source_ = 0;
  DqTurns<DqAdditions::kBulk> turns_;
};

}  // namespace flash_ext::sm90
