// The warpgroup that brings tiles through the copy engine, and computes dQ and adds it to memory.
#pragma once

#include "../ptx/bulk.h"
#include "../ptx/reread.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../ptx/wgmma_across.h"
#include "../sm80/tile.cuh"
#include "backward_work.cuh"

namespace flash_ext::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, grad_out;
};

/// What one warp of it does; the first one loads.
template <class Config>
class BackwardDq {
 public:
  using Element = typename Config::Element;
  using State = BackwardState<Config>;
  using Work = BackwardWork<Config>;
  using Step = BackwardStep;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kN = kPanelColumns / 8;
  using Sum = float[kN][4];
  using KeyTile = TileDescriptor<kBlockN>;
  using DsTile = TileDescriptor<kBlockM>;

  __device__ __forceinline__ BackwardDq(const BackwardParams& p, const BackwardMaps& maps,
                                        const sm80::BackwardWorkspace& workspace, State& state, uint32_t s_tiles,
                                        int warp, int lane)
      : p_(p),
        maps_(maps),
        workspace_(workspace),
        state_(state),
        work_(state.work()),
        warp_(warp),
        lane_(lane),
        s_tiles_(s_tiles),
        keys_(KeyTile::lower_half(s_tiles)),
        ds_(DsTile::lower_half(s_tiles + Config::kDsOffset)) {}

  __device__ __forceinline__ void run() {
    if (warp_ == 0 && work_.tiles.begin < work_.tiles.end) load_first();
#pragma unroll 1
    for (Step step = work_.first_step(); step.head < work_.heads; work_.advance(step)) {
      add(step);
      if (warp_ == 0) load_after(step);
      at_.advance();
    }
    if (lane_ == 0) ptx::tma_store_wait();
  }

 protected:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  /// Panels of rows from `row` on of a head, of which packed sequences are one batch entry; to be announced.
  __device__ __forceinline__ static void load(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int rows,
                                              int row, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < panels(kHeadDim); ++panel)
      ptx::tma_load(s_tile + panel * panel_bytes(rows), &map, s_barrier, panel * kPanelColumns, row, head, batch);
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap& map, const uint64_t& barrier, int offset) const {
    const Sequence& sequence = work_.sequence;
    if (lane_ == 0) {
      ptx::mbarrier_arrive_expect(address(barrier), Config::kKeyBytes);
      load(map, address(barrier), s_tiles_ + offset, kBlockN,
           static_cast<int>(sequence.k_begin) + sequence.leftpad + work_.first_key, sequence.head_kv,
           p_.seq.cu_seqlens_k ? 0 : sequence.cache_row);
    }
    __syncwarp();
  }

  /// A tile of Q with its lse, or of dO with its D.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t s_full, int offset, const float* terms,
                                            const float* s_terms, const Step& step) const {
    if (lane_ == 0) {
      const Sequence& sequence = work_.sequence;
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load(map, s_full, s_tiles_ + offset + at_.stage() * Config::kQueryBytes, kBlockM,
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
    load_keys(maps_.k, state_.k_full, 0);
    load_queries(step);
    load_keys(maps_.v, state_.v_full, Config::kValuesOffset);
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

  /// dQ += dS K of the next tile of queries.
  __device__ __forceinline__ void add(const Step& step) {
    const uint32_t stage = at_.stage();
    ptx::mbarrier_wait(address(state_.ds_full[stage]), at_.parity());
    if (!workspace_.dq) return release(state_.ds_empty[stage]);

    const uint32_t ds = ds_ + stage * (Config::kDsBytes / 16);
#pragma unroll
    for (int panel = 0; panel < panels(kHeadDim); ++panel) {
      Sum sum;
      multiply(sum, ds, keys_ + panel * (panel_bytes(kBlockN) / 16));
      if (panel + 1 == panels(kHeadDim)) release(state_.ds_empty[stage]);
      send(step, panel, sum);
    }
  }

  /// 64 columns of it.
  __device__ __forceinline__ static void multiply(Sum& sum, uint32_t ds, uint32_t keys) {
    ptx::wgmma_fence();
    ptx::wgmma_across<Element, false>(sum, DsTile::at(ds, 0), KeyTile::at(keys, 0));
#pragma unroll
    for (int k = 1; k < kBlockN / 16; ++k)
      ptx::wgmma_across<Element, true>(sum, DsTile::at(ds, DsTile::along_row(k)),
                                       KeyTile::at(keys, KeyTile::down_rows(k)));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) ptx::pin(sum[n][e]);
  }

  /// Through this warp's shared memory for the panel, which the copy engine may still be reading.
  __device__ __forceinline__ void send(const Step& step, int panel, const Sum& sum) const {
    const uint32_t s_sum = s_tiles_ + Config::kDqOffset + (warp_ * panels(kHeadDim) + panel) * Config::kDqPieceBytes;
    const uint32_t s_lane = s_sum + ptx::reread(lane_) * 16;
    if (lane_ == 0) ptx::bulk_wait_read<panels(kHeadDim) - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kN; ++n)
      sm80::store_shared(s_lane + n * 512, float4{sum[n][0], sum[n][1], sum[n][2], sum[n][3]});
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      const int64_t row = workspace_tile(step) * kBlockM + warp_ * 16;
      ptx::bulk_reduce_add(workspace_.dq + row * kHeadDim + panel * (Config::kDqPieceBytes / 4), s_sum,
                           Config::kDqPieceBytes);
      ptx::bulk_commit();
    }
  }

  __device__ __forceinline__ int64_t workspace_tile(const Step& step) const {
    return work_.workspace_tile + step.head * workspace_.tiles_per_head + step.tile;
  }

  __device__ __forceinline__ void release(const uint64_t& barrier) const {
    if (lane_ == 0) ptx::mbarrier_arrive(address(barrier));
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const sm80::BackwardWorkspace& workspace_;
  State& state_;
  const Work& work_;
  const int warp_, lane_;
  const uint32_t s_tiles_;
  const uint32_t keys_, ds_;  // lower halves of descriptors
  RingCount<Config::kStages> at_;
};

}  // namespace flash_ext::sm90
