// The warpgroup that loads tiles through TMA, and computes dQ and adds it to memory: for head dims above
// 128, where a CTA computes some of the columns, from the dS of both CTAs of its cluster.
#pragma once

#include "kernels/common/backward/dq_completion.cuh"
#include "kernels/common/backward/dq_zeroing.cuh"
#include "kernels/ptx/cluster.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduction.h"
#include "kernels/sm90/common/backward/producer.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// Loads K and V of a CTA, and the panels of the other CTA's K that dQ needs here. Called by one thread.
template <class Config>
__device__ __forceinline__ void load_wide_keys(const BackwardParams& p, const BackwardMaps& maps,
                                               BackwardWideStorage<Config>& storage, uint32_t s_tiles,
                                               const Sequence& sequence, int first_key, int rank) {
  const auto load = [&](const CUtensorMap& map, const uint64_t& barrier, int offset, int group, int first, int count) {
    load_keys<Config>(p, map, barrier, s_tiles + offset, sequence, first_key + group * kWarpgroupRows, first, count);
  };
  load(maps.k, storage.k_full, 0, rank, 0, Config::kPanels);
  load(maps.v, storage.v_full, Config::kValuesOffset, rank, 0, Config::kPanels);
  load(maps.k, storage.other_k_full, Config::kOtherKeysOffset, rank ^ 1,
       Config::kAlternatesMiddlePanel ? 0 : rank * Config::kOtherPanels, Config::kOtherPanels);
}

/// One warp of the producer warpgroup, which also computes dQ.
template <class Config>
class BackwardWideDq : BackwardProducer<Config, BackwardWideStorage<Config>> {
 public:
  using Storage = BackwardWideStorage<Config>;
  using Base = BackwardProducer<Config, Storage>;
  using Element = typename Config::Element;
  using Step = BackwardStep;
  static constexpr int kPanels = Config::kPanels;
  static_assert(Config::kBlockM == kWarpgroupRows, "tiles of queries and of keys are loaded alike");
  static constexpr uint32_t kNextPanel = panel_bytes(kWarpgroupRows) / 16;
  using typename Base::Sum;
  using Weights = uint32_t[kWarpgroupRows / 16][4];  // as an operand
  using Tile = TileDescriptor<kWarpgroupRows>;

  __device__ __forceinline__ BackwardWideDq(const BackwardParams& p, const BackwardMaps& maps,
                                            const BackwardWorkspace& workspace, Storage& storage, uint32_t s_tiles,
                                            int rank, int warp, int lane)
      : Base(p, maps, workspace, storage, s_tiles, warp, lane),
        rank_(rank),
        keys_(Tile::lower_half(without_rank<Config>(s_tiles))),
        other_keys_(Tile::lower_half(without_rank<Config>(s_tiles) + Config::kOtherKeysOffset) -
                    (Config::kAlternatesMiddlePanel ? 0 : rank * Config::kOtherPanels) * kNextPanel) {}

  __device__ __forceinline__ void run() {
    if constexpr (Config::kZeroesDq) zero_dq();
    add_all();
    if constexpr (Config::kZeroesDq) {
      if (Base::workspace_.completion.is_used())
        DqCompletion::finish_warp(Base::p_, Base::workspace_, work_tile_.sequence, lane_);
    }
  }

 private:
  static constexpr int kZeroingWarps = 2;  // of a CTA, the last ones
  using DqZeroing = flash_ext::DqZeroing<Config::kBlockM, Config::kDqHeadDim, 1, Config::kCluster * kZeroingWarps>;
  using Base::at_, Base::lane_, Base::s_tiles_, Base::storage_, Base::warp_, Base::work_tile_;

  __device__ __forceinline__ void add_all() {
    if constexpr (Config::kHasOptions) {
      run_found();
    } else {
      if (warp_ == 0 && work_tile_.tiles.begin < work_tile_.tiles.end) load_first();
      if constexpr (Config::kZeroesDq) DqZeroing::wait(Base::workspace_, work_tile_.sequence);
#pragma unroll 1
      for (Step step = work_tile_.first_step(); step.head < work_tile_.heads; work_tile_.advance(step)) {
        add(step);
        if (warp_ == 0) this->load_after(step);
        at_.advance();
      }
      if constexpr (Config::kTurns == TurnTaking::kAlways) turns_.end(Base::workspace_.turns, lane_);
    }
  }

  /// Zeroes sums of dQ of later clusters, by the last warps, while the first one loads.
  __device__ __forceinline__ void zero_dq() const {
    if (!Base::workspace_.zeroing.is_used() || warp_ < kWarpgroupWarps - kZeroingWarps) return;
    const int warp = rank_ * kZeroingWarps + warp_ % kZeroingWarps;
    DqZeroing::zero_share_of(Base::p_, Base::workspace_, blockIdx.x / Config::kCluster, warp, lane_);
  }
  __device__ __forceinline__ void load_first() {
    Step step = work_tile_.first_step();
    this->load_queries(step);
    this->load_grads(step);
    work_tile_.advance(step);
    this->load_second(step);
  }

  /// The steps that masks leave, each found two steps before its dQ.
  __device__ __forceinline__ void run_found() {
    BackwardWideSteps<Config> steps(Base::p_, Base::workspace_, work_tile_, lane_);
    Step now = steps.next();
    if (warp_ == 0) load_found(steps.describe(now));
    if (is_past(now)) {
      // Sums that are reported complete have been zeroed, also if no cluster of the head has a step.
      if constexpr (Config::kZeroesDq) DqZeroing::wait(Base::workspace_, work_tile_.sequence);
      return;
    }
    Step next = steps.next();
    if (warp_ == 0) {
      at_.advance();
      load_found(steps.describe(next));
      at_.count = 0;
    }
    if constexpr (Config::kZeroesDq) DqZeroing::wait(Base::workspace_, work_tile_.sequence);
#pragma unroll 1
    while (true) {
      add(now);
      if (is_past(next)) return;
      now = next;
      next = steps.next();
      if (warp_ == 0) {
        const BackwardWideStep found = steps.describe(next);
        wait_for(storage_.do_empty[at_.stage()], at_.parity());
        wait_for(storage_.q_empty[at_.stage()], at_.parity());
        load_found(found);
      }
      at_.advance();
    }
  }
  __device__ __forceinline__ bool is_past(const Step& step) const { return step.head >= work_tile_.heads; }
  /// Loads a step in the stages of at_, which are free, or says that there is none.
  __device__ __forceinline__ void load_found(const BackwardWideStep& step) const {
    const uint32_t stage = at_.stage();
    if (lane_ == 0) storage_.steps[stage] = step;
    if (is_past(step)) return this->release(storage_.q_full[stage]);
    this->load_queries(step);
    this->load_grads(step);
  }

  /// Adds dS K to dQ of the next query tile. Both dS go to registers at once, so that their slots are soon free.
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t parity = at_.count % 2;
    Weights ds[2];  // of this CTA's keys and of the other's
    wait_for(storage_.ds_full, parity);
    if (warp_ == 0 && lane_ == 0) {
      // There is room: the other CTA has arrived at ds_empty, or this dS would not be there.
      ptx::cluster_copy(ptx::cluster_address(s_tiles_ + Config::kOtherDsOffset, rank_ ^ 1),
                        s_tiles_ + Config::kDsOffset, Config::kDsBytes,
                        ptx::cluster_address(address(storage_.other_ds_full), rank_ ^ 1));
      ptx::mbarrier_arrive_expect(address(storage_.other_ds_full), Config::kDsBytes);
    }
    __syncwarp();
    read_ds(ds[0], Config::kDsOffset);
    this->release(storage_.ds_empty);
    wait_for(storage_.other_ds_full, parity);
    read_ds(ds[1], Config::kOtherDsOffset);
    // The copy of the other CTA's dS has been read, so it is over: the other CTA may overwrite that dS, and copy the
    // next one here.
    if (lane_ == 0) ptx::cluster_arrive(ptx::cluster_address(address(storage_.ds_empty), rank_ ^ 1));
    if (!Base::workspace_.dq) return;

    const bool second = Config::kAlternatesMiddlePanel ? parity != static_cast<uint32_t>(rank_) : rank_ != 0;
    const int end = second ? kPanels : (kPanels + 1) / 2;
    const int first = second ? (kPanels + 1) / 2 : 0;
#pragma unroll 1
    for (int panel = first; panel < end; ++panel) {
      Sum sum;
#pragma unroll
      for (int n = 0; n < kPanelColumns / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
      ptx::wgmma_fence();
      multiply(sum, ds[0], keys_ + panel * kNextPanel);
      multiply(sum, ds[1], other_keys_ + panel * kNextPanel);
      ptx::wgmma_commit();
      if constexpr (Config::kTurns == TurnTaking::kAlways)
        if (panel == first) wait_for_turn(step, second);
      this->finish(sum);
      send(step, panel, sum);
    }
  }

  /// Reads dS of this warp's 16 queries, as an operand.
  __device__ __forceinline__ void read_ds(Weights& ds, int offset) const {
    const int lane = ptx::reread(lane_), row = 16 * warp_ + lane % 16;
    const uint32_t s_row = s_tiles_ + offset + row * kPanelRowBytes;
#pragma unroll
    for (int k = 0; k < kWarpgroupRows / 16; ++k)
      ptx::ldmatrix_x4(ds[k], s_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
    ptx::wait_for_fragments(ds);
  }

  /// Starts sum += dS K, for 64 columns of dQ.
  __device__ __forceinline__ static void multiply(Sum& sum, const Weights& ds, uint32_t keys) {
#pragma unroll
    for (int k = 0; k < kWarpgroupRows / 16; ++k)
      ptx::Wgmma<Element, kPanelColumns>::template multiply_registers<true>(sum, ds[k],
                                                                            Tile::at(keys, Tile::down_rows(k)));
  }

  /// Waits for this warp's turn at a tile; `second`: at its last columns, which have a counter of their own.
  __device__ __forceinline__ void wait_for_turn(const Step& step, bool second) {
    const int part = (second ? kWarpgroupWarps : 0) + warp_, turn = work_tile_.turn(step.tile);
    turns_.advance(Base::workspace_.turns, static_cast<int>(this->workspace_tile(step)) * kDqWarps + part, turn, lane_);
    turns_.wait(Base::workspace_.turns, turn);
  }

  __device__ __forceinline__ void send(const Step& step, int panel, const Sum& sum) const {
    float* const g_lane = this->dq_slice(step, panel) + lane_ * 4;
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int n = 0; n < kPanelColumns / 8; ++n) ptx::reduce_add_4(g_lane + n * 128, sum[n]);
#endif
  }

  const int rank_;
  const uint32_t keys_, other_keys_;  // lower halves of descriptors
  DqTurns<DqAdditions::kOfRegisters> turns_;
};

}  // namespace flash_ext::sm90
