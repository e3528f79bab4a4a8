// The warpgroup that loads tiles, and computes dQ and adds it to memory.
#pragma once

#include "kernels/ptx/wgmma_across.h"
#include "kernels/sm90/common/backward/producer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of it.
template <class Config, class Storage = BackwardStorage<Config>>
class BackwardDq : protected BackwardProducer<Config, Storage> {
 public:
  using Base = BackwardProducer<Config, Storage>;
  using Element = typename Config::Element;
  using Step = BackwardStep;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = TileDescriptor<kBlockM>;

  __device__ __forceinline__ BackwardDq(const BackwardParams& p, const BackwardMaps& maps,
                                        const BackwardWorkspace& workspace, Storage& storage, uint32_t s_tiles,
                                        int warp, int lane)
      : Base(p, maps, workspace, storage, s_tiles, warp, lane),
        keys_(KeyTile::lower_half(s_tiles)),
        ds_(DsTile::lower_half(s_tiles + Config::kDsOffset)) {}

  __device__ __forceinline__ void run() {
    if (warp_ == 0 && work_tile_.tiles.begin < work_tile_.tiles.end) {
      const Step first = work_tile_.first_step();
      Step second = first;
      work_tile_.advance(second);
      load_first(first, second);
    }
#pragma unroll 1
    for (Step step = work_tile_.first_step(); step.head < work_tile_.heads; work_tile_.advance(step)) {
      add(step, [] {});
      if (warp_ == 0) this->load_after(step);
      at_.advance();
    }
    end_additions();
  }

 protected:
  using Base::at_, Base::kPanels, Base::lane_, Base::maps_, Base::p_, Base::s_tiles_, Base::storage_, Base::warp_,
      Base::work_tile_, Base::workspace_;
  using typename Base::Sum;

  /// In the order in which the consumers need them.
  __device__ __forceinline__ void load_first(const Step& first, const Step& second) {
    this->load_keys(maps_.k, storage_.k_full, 0);
    this->load_queries(first);
    this->load_keys(maps_.v, storage_.v_full, Config::kValuesOffset);
    this->load_grads(first);
    this->load_second(second);
  }

  /// dQ += dS K of the next query tile. meanwhile() runs once dS is there, beside the first product.
  template <class Meanwhile>
  __device__ __forceinline__ void add(const Step& step, Meanwhile meanwhile) {
    const uint32_t stage = at_.stage();
    wait_for(storage_.ds_full[stage], at_.parity());
    if (!workspace_.dq) {
      meanwhile();
      return this->release(storage_.ds_empty[stage]);
    }

    const uint32_t ds = ds_ + stage * (Config::kDsBytes / 16);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      Sum sum;
      start(sum, ds, keys_ + panel * (panel_bytes(kBlockN) / 16));
      if (panel == 0) {
        meanwhile();
        if constexpr (Config::kTurns == TurnTaking::kAlways) advance_turn(step);
      }
      this->finish(sum);
      if (panel + 1 == kPanels) this->release(storage_.ds_empty[stage]);
      if constexpr (Config::kTurns == TurnTaking::kAlways)
        if (panel == 0) wait_for_turn(step);
      send(step, panel, sum);
    }
  }

  // A turn of this warp's additions ends beside the first product of the next step.

  __device__ __forceinline__ void advance_turn(const Step& step) {
    const int slot = static_cast<int>(this->workspace_tile(step)) * kDqWarps + warp_;
    turns_.advance(workspace_.turns, slot, work_tile_.turn(step.tile), lane_);
  }
  __device__ __forceinline__ void wait_for_turn(const Step& step) const {
    turns_.wait(workspace_.turns, work_tile_.turn(step.tile));
  }
  __device__ __forceinline__ void end_additions() {
    if constexpr (Config::kTurns == TurnTaking::kAlways) {
      turns_.end(workspace_.turns, lane_);
      if (lane_ == 0) ptx::bulk_wait();
    } else {
      if (lane_ == 0) ptx::tma_store_wait();
    }
  }

  /// 64 columns of dQ.
  __device__ __forceinline__ static void start(Sum& sum, uint32_t ds, uint32_t keys) {
    ptx::wgmma_fence();
    ptx::wgmma_across<Element, false>(sum, DsTile::at(ds, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      ptx::wgmma_across<Element, true>(sum, DsTile::at(ds, DsTile::along_row(k)),
                                       KeyTile::at(keys, KeyTile::down_rows(k)));
    ptx::wgmma_commit();
  }

  /// Adds a panel to memory, through this warp's shared memory for it.
  __device__ __forceinline__ void send(const Step& step, int panel, const Sum& sum) const {
    this->stage(sum, panel);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      ptx::bulk_reduce_add(this->dq_piece(step, panel), this->s_piece(panel), Config::kDqPieceBytes);
      ptx::bulk_commit();
    }
  }

  const uint32_t keys_, ds_;  // lower halves of descriptors
  DqTurns turns_;
};

}  // namespace flash_ext::sm90
