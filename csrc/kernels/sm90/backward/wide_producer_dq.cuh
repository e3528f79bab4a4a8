// The warpgroup that brings tiles through TMA, and computes dQ and adds it to memory: for head dims above
// 128, where a block computes some of the columns, from the dS of both blocks of its cluster.
#pragma once

#include "kernels/ptx/cluster.h"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/reduction.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/wgmma.h"
#include "producer.cuh"
#include "wide_storage.cuh"

namespace flash_ext::sm90 {

/// K and V of a block, and the panels of the other block's K that dQ needs here. By one thread.
template <class Config>
__device__ __forceinline__ void load_wide_keys(const BackwardParams& p, const BackwardMaps& maps,
                                               BackwardWideState<Config>& state, uint32_t s_tiles,
                                               const Sequence& sequence, int first_key, int rank) {
  const auto load = [&](const CUtensorMap& map, const uint64_t& barrier, int offset, int group, int first, int count) {
    load_keys<Config>(p, map, barrier, s_tiles + offset, sequence, first_key + group * kGroupRows, first, count);
  };
  load(maps.k, state.k_full, 0, rank, 0, Config::kPanels);
  load(maps.v, state.v_full, Config::kValuesOffset, rank, 0, Config::kPanels);
  load(maps.k, state.other_k_full, Config::kOtherKeysOffset, rank ^ 1,
       Config::kTakesTurns ? 0 : rank * Config::kOtherPanels, Config::kOtherPanels);
}

/// What one warp of it does.
template <class Config>
class BackwardWideDq : BackwardLoader<Config, BackwardWideState<Config>> {
 public:
  using State = BackwardWideState<Config>;
  using Base = BackwardLoader<Config, State>;
  using Element = typename Config::Element;
  using Step = BackwardStep;
  static constexpr int kPanels = Config::kPanels;
  static_assert(Config::kBlockM == kGroupRows, "tiles of queries and of keys are loaded alike");
  static constexpr int kN = kPanelColumns / 8;
  static constexpr uint32_t kPanel = panel_bytes(kGroupRows) / 16;
  using Sum = float[kN][4];
  using Weights = uint32_t[kGroupRows / 16][4];  // as an operand
  using Tile = TileDescriptor<kGroupRows>;

  __device__ __forceinline__ BackwardWideDq(const BackwardParams& p, const BackwardMaps& maps,
                                            const BackwardWorkspace& workspace, State& state, uint32_t s_tiles,
                                            int rank, int warp, int lane)
      : Base(p, maps, workspace, state, s_tiles, warp, lane),
        rank_(rank),
        keys_(Tile::lower_half(without_rank<Config>(s_tiles))),
        other_keys_(Tile::lower_half(without_rank<Config>(s_tiles) + Config::kOtherKeysOffset) -
                    (Config::kTakesTurns ? 0 : rank * Config::kOtherPanels) * kPanel) {}

  __device__ __forceinline__ void run() {
    if (warp_ == 0 && work_.tiles.begin < work_.tiles.end) load_first();
#pragma unroll 1
    for (Step step = work_.first_step(); step.head < work_.heads; work_.advance(step)) {
      add(step);
      if (warp_ == 0) this->load_after(step);
      at_.advance();
    }
  }

 private:
  using Base::at_;
  using Base::lane_;
  using Base::s_tiles_;
  using Base::state_;
  using Base::warp_;
  using Base::work_;

  __device__ __forceinline__ void load_first() {
    Step step = work_.first_step();
    this->load_queries(step);
    this->load_grads(step);
    work_.advance(step);
    this->load_second(step);
  }

  /// dQ += dS K of the next tile of queries. Both dS go to registers at once, so that their places are soon free.
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t parity = at_.count % 2;
    Weights ds[2];  // of this block's keys and of the other's
    wait_for(state_.ds_full, parity);
    if (warp_ == 0 && lane_ == 0) {
      // There is room: the other block has arrived at ds_empty, or this dS would not be there.
      ptx::cluster_copy(ptx::cluster_address(s_tiles_ + Config::kOtherDsOffset, rank_ ^ 1),
                        s_tiles_ + Config::kDsOffset, Config::kDsBytes,
                        ptx::cluster_address(address(state_.other_ds_full), rank_ ^ 1));
      ptx::mbarrier_arrive_expect(address(state_.other_ds_full), Config::kDsBytes);
    }
    __syncwarp();
    read_ds(ds[0], Config::kDsOffset);
    this->release(state_.ds_empty);
    wait_for(state_.other_ds_full, parity);
    read_ds(ds[1], Config::kOtherDsOffset);
    // The copy has been read, so it is over.
    if (lane_ == 0) ptx::cluster_arrive(ptx::cluster_address(address(state_.ds_empty), rank_ ^ 1));
    if (!Base::workspace_.dq) return;

    const bool second = Config::kTakesTurns ? parity != static_cast<uint32_t>(rank_) : rank_ != 0;
    const int end = second ? kPanels : (kPanels + 1) / 2;
#pragma unroll 1
    for (int panel = second ? (kPanels + 1) / 2 : 0; panel < end; ++panel) {
      Sum sum;
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[n][e] = 0.0f;
      ptx::wgmma_fence();
      multiply(sum, ds[0], keys_ + panel * kPanel);
      multiply(sum, ds[1], other_keys_ + panel * kPanel);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int n = 0; n < kN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) ptx::pin(sum[n][e]);
      send(step, panel, sum);
    }
  }

  /// This warp's 16 queries, as an operand.
  __device__ __forceinline__ void read_ds(Weights& ds, int offset) const {
    const int lane = ptx::reread(lane_), row = 16 * warp_ + lane % 16;
    const uint32_t s_row = s_tiles_ + offset + row * kPanelRowBytes;
#pragma unroll
    for (int k = 0; k < kGroupRows / 16; ++k) ptx::ldmatrix_x4(ds[k], s_row + ((2 * k + lane / 16) ^ (lane % 8)) * 16);
    ptx::wait_for_fragments(ds);
  }

  /// 64 columns of it.
  __device__ __forceinline__ static void multiply(Sum& sum, const Weights& ds, uint32_t keys) {
#pragma unroll
    for (int k = 0; k < kGroupRows / 16; ++k)
      ptx::Wgmma<Element, kPanelColumns>::accumulate_transposed(sum, ds[k], Tile::at(keys, Tile::down_rows(k)));
  }

  __device__ __forceinline__ void send(const Step& step, int panel, const Sum& sum) const {
    float* const g_lane = this->dq_piece(step, panel) + lane_ * 4;
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::reduce_add_4(g_lane + n * 128, sum[n]);
#endif
  }

  const int rank_;
  const uint32_t keys_, other_keys_;  // lower halves of descriptors
};

}  // namespace flash_ext::sm90
