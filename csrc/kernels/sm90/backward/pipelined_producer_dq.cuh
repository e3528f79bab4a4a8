// The warpgroup that loads tiles three steps at a time, and computes dQ and adds it to memory.
#pragma once

#include "kernels/common/tile.cuh"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/wgmma.h"
#include "kernels/ptx/wgmma_across.h"
#include "producer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// What one warp of it does.
template <class Config, class Storage_ = BackwardPipelinedStorage<Config>>
class BackwardPipelinedDq {
 public:
  using Element = typename Config::Element;
  using Storage = Storage_;
  using Steps = BackwardStepsOf<Config>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kPanels = panels(Config::kHeadDim);

  __device__ __forceinline__ BackwardPipelinedDq(const BackwardParams& p, const BackwardMaps& maps,
                                                 const BackwardWorkspace& workspace, Storage& storage, uint32_t s_tiles,
                                                 int warp, int lane)
      : p_(p),
        maps_(maps),
        workspace_(workspace),
        storage_(storage),
        work_tile_(storage.work_tile),
        warp_(warp),
        lane_(lane),
        s_tiles_(s_tiles),
        keys_(KeyTile::lower_half(s_tiles)),
        ds_(DsTile::lower_half(s_tiles + Config::kDsOffset)),
        first_row_(ptx::uniform(static_cast<int>(work_tile_.sequence.q_begin))),
        batch_(p.seq.cu_seqlens_q ? 0 : ptx::uniform(work_tile_.sequence.batch)),
        first_tile_(ptx::uniform(work_tile_.workspace_tile - work_tile_.sequence.head * workspace.tiles_per_head)) {}

  __device__ __forceinline__ void run() {
    if (work_tile_.tiles.begin < work_tile_.tiles.end) load_and_add();
    if (lane_ == 0) ptx::tma_store_wait();
  }

 protected:
  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = TileDescriptor<kBlockN>;
  using Sum = float[kPanelColumns / 8][4];

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Loads loads{step, first_term(step)};
    if (warp_ == 0) load_keys(maps_.k, storage_.k_full, 0);
    if (warp_ == 1) load_keys(maps_.v, storage_.v_full, Config::kValuesOffset);
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) {
      load(loads);
      advance(loads);
    }
#pragma unroll 1
    for (; !step.is_past_end(); step.advance()) {
      wait_for(storage_.ds_full[at_.stage()], at_.parity());
      // That dS is complete says that all products of the step before are over.
      load(loads);
      if (workspace_.dq) {
        add(step);
      } else {
        arrive_as_warp(storage_.ds_empty[at_.stage()], lane_);
      }
      at_.advance();
      advance(loads);
    }
    send();
    turns_.end(workspace_.turns, lane_);
  }

  // ---- Loads: of K, Q and lse by the first warp, of V, dO and D by the second

  /// Of which step Q and dO come next, and where its row terms begin.
  struct Loads {
    Steps step;
    int64_t first_term;
  };

  __device__ __forceinline__ void advance(Loads& loads) const {
    loads.step.advance();
    const bool is_next = !loads.step.takes_turns() && loads.step.tile != loads.step.first;
    loads.first_term = is_next ? loads.first_term + int64_t{kBlockM} : first_term(loads.step);
  }
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, const uint64_t& barrier, int offset) const {
    if (lane_ == 0)
      sm90::load_keys<Config>(p_, map, barrier, s_tiles_ + offset, work_tile_.sequence, work_tile_.first_key, 0,
                              kPanels);
    __syncwarp();
  }
  __device__ __forceinline__ void load(const Loads& loads) const {
    if (warp_ > 1 || loads.step.is_past_end()) return;
    if (warp_ == 0) {
      load_tile(maps_.q, storage_.q_full, Config::kQueriesOffset, workspace_.lse, storage_.lse, loads);
    } else {
      load_tile(maps_.grad_out, storage_.do_full, Config::kGradsOffset, workspace_.minus_delta, storage_.minus_delta,
                loads);
    }
  }
  /// A tile of Q with its lse, or of dO with its D.
  template <class AnyLoads>
  __device__ __forceinline__ void load_tile(const CUtensorMap& map, const uint64_t (&full)[Config::kStages],
                                            int tiles_offset, const float* g_terms,
                                            const float (&terms)[Config::kStages][kBlockM],
                                            const AnyLoads& loads) const {
    const uint32_t stage = loads.step.stage, s_full = address(full[0]) + stage * sizeof(uint64_t);
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load_panels(map, s_full, s_tiles_ + tiles_offset + stage * Config::kQueryBytes, kBlockM, 0, kPanels,
                  first_row_ + loads.step.tile * kBlockM, loads.step.head, batch_);
      ptx::bulk_load(ptx::shared_address(terms) + stage * Config::kTermBytes, g_terms + loads.first_term,
                     Config::kTermBytes, s_full);
    }
    __syncwarp();
  }
  template <class Step>
  __device__ __forceinline__ int64_t first_term(const Step& step) const {
    return (first_tile_ + step.head * workspace_.tiles_per_head + step.tile) * kBlockM;
  }

  // ---- dQ

  /// dQ += dS K
  template <class Step>
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t ds = ds_ + at_.stage() * (Config::kDsBytes / 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      Sum sum;
      start(sum, ds, keys_ + panel * (panel_bytes(kBlockN) / 16));
      // Its fence waits for stores, which are slow beside other warpgroups' products: meanwhile this one is under way.
      if constexpr (Config::kTurns != TurnTaking::kNever) {
        if (panel == 1) wait_for_turn(step);
      }
      send();
      finish(sum);
      if (panel + 1 == kPanels) arrive_as_warp(storage_.ds_empty[at_.stage()], lane_);
      stage(sum, panel);
      g_target_ = dq_piece(step, panel);
      s_source_ = s_piece(panel);
    }
  }

  /// 64 columns of it.
  __device__ __forceinline__ static void start(Sum& sum, uint32_t ds, uint32_t keys) {
    ptx::wgmma_fence();
    ptx::wgmma_transposed<Element, false>(sum, DsTile::at(ds, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      ptx::wgmma_transposed<Element, true>(sum, DsTile::at(ds, DsTile::down_rows(k)),
                                           KeyTile::at(keys, KeyTile::down_rows(k)));
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void finish(Sum& sum) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kPanelColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::fence_operand(sum[n][e]);
  }

  /// This warp's shared memory for a panel.
  __device__ __forceinline__ uint32_t s_piece(int panel) const {
    return s_tiles_ + Config::kDqOffset + (warp_ * kPanels + panel) * Config::kDqPieceBytes;
  }
  /// To there, which TMA may still be reading.
  __device__ __forceinline__ void stage(const Sum& sum, int panel) const {
    const uint32_t s_lane = s_piece(panel) + ptx::reread(lane_) * 16;
    if (lane_ == 0) ptx::bulk_wait_read<kPanels - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kPanelColumns / 8; ++n)
      store_shared(s_lane + n * 512, float4{sum[n][0], sum[n][1], sum[n][2], sum[n][3]});
  }
  /// What was staged last, if anything was, to memory.
  __device__ __forceinline__ void send() {
    if (!g_target_) return;
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      ptx::bulk_reduce_add(g_target_, s_source_, Config::kDqPieceBytes);
      ptx::bulk_commit();
    }
    __syncwarp();
  }
  /// Of this warp's additions to a tile, of which the first panel is sent next. The turn of the step before, whose last
  /// panel was sent half a step ago, ends.
  __device__ __forceinline__ void wait_for_turn(const Steps& step) {
    static_assert(kPanels == 2);
    if (!workspace_.turns) return;
    const int slot = static_cast<int>(first_term(step) / kBlockM) * kDqWarps + warp_, turn = work_tile_.turn(step.tile);
    turns_.advance(workspace_.turns, slot, turn, lane_);
    turns_.wait(workspace_.turns, turn);
  }
  /// dQ of this warp's 16 queries: the first of a panel's 64 columns.
  template <class Step>
  __device__ __forceinline__ float* dq_piece(const Step& step, int panel) const {
    return workspace_.dq + (first_term(step) + warp_ * 16) * Config::kHeadDim + panel * (16 * kPanelColumns);
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const BackwardWorkspace& workspace_;
  Storage& storage_;
  const BackwardWorkTile<Config>& work_tile_;
  const int warp_, lane_;
  const uint32_t s_tiles_;
  const uint32_t keys_, ds_;  // lower halves of descriptors
  const int first_row_, batch_;
  const int64_t first_tile_;  // of head 0 in the workspace
  RingCount<Config::kDsStages> at_;
  float* g_target_ = nullptr;  // where what was staged last goes
  uint32_t s_source_ = 0;
  DqTurns turns_;
};

}  // namespace flash_ext::sm90
