// The warpgroup that brings tiles through the copy engine, and computes dQ and adds it to memory: for head dims above
// 128, where a block computes some of the columns, from the dS of both blocks of its cluster.
#pragma once

#include "../ptx/bulk.h"
#include "../ptx/cluster.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/reduction.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "backward_dq.cuh"
#include "backward_wide_work.cuh"

namespace flash_ext::sm90 {

/// Panels [first, first + count) of 64 rows from `row` on of a head; to be announced.
__device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int first,
                                            int count, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < count; ++panel)
    ptx::tma_load(s_tile + panel * panel_bytes(kGroupRows), &map, s_barrier, (first + panel) * kPanelColumns, row, head,
                  batch);
}

/// K and V of a block, and the panels of the other block's K that dQ needs here. By one thread.
template <class Config>
__device__ __forceinline__ void load_wide_keys(const BackwardParams& p, const BackwardMaps& maps,
                                               BackwardWideState<Config>& state, uint32_t s_tiles,
                                               const Sequence& sequence, int first_key, int rank) {
  const auto load = [&](const CUtensorMap& map, uint64_t& barrier, int offset, int group, int first, int count) {
    const uint32_t s_full = ptx::shared_address(&barrier);
    ptx::mbarrier_arrive_expect(s_full, count * panel_bytes(kGroupRows));
    load_panels(map, s_full, s_tiles + offset, first, count,
                static_cast<int>(sequence.k_begin) + sequence.leftpad + first_key + group * kGroupRows,
                sequence.head_kv, p.seq.cu_seqlens_k ? 0 : sequence.cache_row);
  };
  load(maps.k, state.k_full, 0, rank, 0, Config::kPanels);
  load(maps.v, state.v_full, Config::kValuesOffset, rank, 0, Config::kPanels);
  load(maps.k, state.other_k_full, Config::kOtherKeysOffset, rank ^ 1,
       Config::kTakesTurns ? 0 : rank * Config::kOtherPanels, Config::kOtherPanels);
}

/// What one warp of it does; the first one loads.
template <class Config>
class BackwardWideDq {
 public:
  using Element = typename Config::Element;
  using State = BackwardWideState<Config>;
  using Work = BackwardWork<Config>;
  using Step = BackwardStep;
  static constexpr int kBlockM = Config::kBlockM, kPanels = Config::kPanels;
  static_assert(kBlockM == kGroupRows, "tiles of queries and of keys are loaded alike");
  static constexpr int kN = kPanelColumns / 8;
  static constexpr uint32_t kPanel = panel_bytes(kGroupRows) / 16;
  using Sum = float[kN][4];
  using Weights = uint32_t[kGroupRows / 16][4];  // as an operand
  using Tile = TileDescriptor<kGroupRows>;

  __device__ __forceinline__ BackwardWideDq(const BackwardParams& p, const BackwardMaps& maps,
                                            const sm80::BackwardWorkspace& workspace, State& state, uint32_t s_tiles,
                                            int rank, int warp, int lane)
      : p_(p),
        maps_(maps),
        workspace_(workspace),
        state_(state),
        work_(state.work()),
        rank_(rank),
        warp_(warp),
        lane_(lane),
        s_tiles_(s_tiles),
        keys_(Tile::lower_half(without_rank(s_tiles))),
        other_keys_(Tile::lower_half(without_rank(s_tiles) + Config::kOtherKeysOffset) -
                    (Config::kTakesTurns ? 0 : rank * Config::kOtherPanels) * kPanel) {}

  __device__ __forceinline__ void run() {
    if (warp_ == 0 && work_.tiles.begin < work_.tiles.end) load_first();
#pragma unroll 1
    for (Step step = work_.first_step(); step.head < work_.heads; work_.advance(step)) {
      add(step);
      if (warp_ == 0) load_after(step);
      at_.advance();
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  /// A tile of Q with its lse, or of dO with its D.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t s_full, int offset, const float* terms,
                                            const float* s_terms, const Step& step) const {
    if (lane_ == 0) {
      const Sequence& sequence = work_.sequence;
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load_panels(map, s_full, s_tiles_ + offset + at_.stage() * Config::kQueryBytes, 0, kPanels,
                  static_cast<int>(sequence.q_begin) + step.tile * kBlockM, sequence.head + step.head,
                  p_.seq.cu_seqlens_q ? 0 : sequence.batch);
      ptx::bulk_load(ptx::shared_address(s_terms), terms + workspace_tile(step) * kBlockM, Config::kTermBytes, s_full);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_queries(const Step& step) const {
    const uint32_t stage = at_.stage();
    load_rows(maps_.q, address(state_.q_full[stage]), Config::kQueriesOffset, workspace_.lse, state_.lse[stage], step);
  }
  __device__ __forceinline__ void load_grads(const Step& step) const {
    const uint32_t stage = at_.stage();
    load_rows(maps_.grad_out, address(state_.do_full[stage]), Config::kGradsOffset, workspace_.minus_delta,
              state_.minus_delta[stage], step);
  }

  __device__ __forceinline__ void load_first() {
    Step step = work_.first_step();
    load_queries(step);
    load_grads(step);
    at_.advance();
    work_.advance(step);
    if (step.head < work_.heads) {
      load_queries(step);
      load_grads(step);
    }
    at_.count = 0;
  }
  /// What takes the places of a step's tiles when that is over.
  __device__ __forceinline__ void load_after(Step step) const {
    for (int k = 0; k < Config::kStages; ++k) work_.advance(step);
    if (step.head >= work_.heads) return;
    ptx::mbarrier_wait(address(state_.do_empty[at_.stage()]), at_.parity());
    load_grads(step);
    ptx::mbarrier_wait(address(state_.q_empty[at_.stage()]), at_.parity());
    load_queries(step);
  }

  /// dQ += dS K of the next tile of queries. Both dS go to registers at once, so that their places are soon free.
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t parity = at_.count % 2;
    Weights ds[2];  // of this block's keys and of the other's
    ptx::mbarrier_wait(address(state_.ds_full), parity);
    if (warp_ == 0 && lane_ == 0) {
      // There is room: the other block has arrived at ds_empty, or this dS would not be there.
      ptx::cluster_copy(ptx::cluster_address(s_tiles_ + Config::kOtherDsOffset, rank_ ^ 1),
                        s_tiles_ + Config::kDsOffset, Config::kDsBytes,
                        ptx::cluster_address(address(state_.other_ds_full), rank_ ^ 1));
      ptx::mbarrier_arrive_expect(address(state_.other_ds_full), Config::kDsBytes);
    }
    __syncwarp();
    read_ds(ds[0], Config::kDsOffset);
    if (lane_ == 0) ptx::mbarrier_arrive(address(state_.ds_empty));
    ptx::mbarrier_wait(address(state_.other_ds_full), parity);
    read_ds(ds[1], Config::kOtherDsOffset);
    // The copy has been read, so it is over.
    if (lane_ == 0) ptx::cluster_arrive(ptx::cluster_address(address(state_.ds_empty), rank_ ^ 1));
    if (!workspace_.dq) return;

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
    __syncwarp();
  }

  /// 64 columns of it.
  __device__ __forceinline__ static void multiply(Sum& sum, const Weights& ds, uint32_t keys) {
#pragma unroll
    for (int k = 0; k < kGroupRows / 16; ++k)
      ptx::Wgmma<Element, kPanelColumns>::accumulate_transposed(sum, ds[k], Tile::at(keys, Tile::down_rows(k)));
  }

  __device__ __forceinline__ void send(const Step& step, int panel, const Sum& sum) const {
    const int64_t row = workspace_tile(step) * kBlockM + warp_ * 16;
    float* const g_lane = workspace_.dq + row * Config::kDqHeadDim + panel * (16 * kPanelColumns) + lane_ * 4;
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int n = 0; n < kN; ++n) ptx::reduce_add_4(g_lane + n * 128, sum[n]);
#endif
  }

  __device__ __forceinline__ int64_t workspace_tile(const Step& step) const {
    return work_.workspace_tile + step.head * workspace_.tiles_per_head + step.tile;
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const sm80::BackwardWorkspace& workspace_;
  State& state_;
  const Work& work_;
  const int rank_, warp_, lane_;
  const uint32_t s_tiles_;
  const uint32_t keys_, other_keys_;  // lower halves of descriptors
  RingCount<Config::kStages> at_;
};

}  // namespace flash_ext::sm90
