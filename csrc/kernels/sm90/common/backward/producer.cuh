// Loads of the backward's tiles by TMA.
#pragma once

#include "kernels/common/tile.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/tma.h"
#include "kernels/ptx/wgmma.h"
#include "maps.h"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Loads panels [first, first + count) of `rows` rows of a head, from `row` on. Packed sequences are one batch entry.
/// The caller announces the bytes.
__device__ __forceinline__ void load_panels(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int rows,
                                            int first, int count, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < count; ++panel)
    ptx::tma_load(s_tile + panel * panel_bytes(rows), &map, s_barrier, (first + panel) * kPanelColumns, row, head,
                  batch);
}

/// Loads panels [first, first + count) of a sequence's keys, and announces their bytes. Called by one thread.
template <class Config>
__device__ __forceinline__ void load_keys(const BackwardParams& p, const CUtensorMap& map, const uint64_t& barrier,
                                          uint32_t s_tile, const Sequence& sequence, int first_key, int first,
                                          int count) {
  ptx::mbarrier_arrive_expect(address(barrier), count * panel_bytes(Config::kLoadedKeys));
  load_panels(map, address(barrier), s_tile, Config::kLoadedKeys, first, count,
              static_cast<int>(sequence.k_begin) + sequence.leftpad + first_key, sequence.head_kv,
              p.seq.cu_seqlens_k ? 0 : sequence.cache_row);
}

/// A slice of dQ: a warp's part of one product, on its way from registers through shared memory to memory.
template <class Config>
struct BackwardDqSlice {
  static constexpr int kPanels = panels(Config::kHeadDim);
  // 64 columns of dQ, of the warp's 16 queries; or of dQ^T, all queries of the warp's 16 columns.
  using Sum = float[Config::kBlockM / 8][4];

  /// Waits for the product.
  __device__ __forceinline__ static void finish(Sum& sum) {
    ptx::wgmma_wait<0>();
    ptx::fence_operand(sum);
  }
  /// The warp's shared memory for a panel.
  __device__ __forceinline__ static uint32_t slot(uint32_t s_tiles, int warp, int panel) {
    return s_tiles + Config::kDqOffset + (warp * kPanels + panel) * Config::kDqSliceBytes;
  }
  /// Stores the product to s_slot, once TMA has read what the slot held before.
  __device__ __forceinline__ static void stage(uint32_t s_slot, const Sum& sum, int lane) {
    const uint32_t s_lane = s_slot + ptx::reread(lane) * 16;
    if (lane == 0) ptx::bulk_wait_read<kPanels - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Config::kBlockM / 8; ++n)
      store_shared(s_lane + n * 512, float4{sum[n][0], sum[n][1], sum[n][2], sum[n][3]});
  }
  /// Adds the slot's contents to memory, at g_target, or stores them there.
  __device__ __forceinline__ static void send(float* g_target, uint32_t s_slot, int lane,
                                              int bytes = Config::kDqSliceBytes, bool stores = false) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      if (stores) {
        ptx::bulk_store(g_target, s_slot, bytes);
      } else {
        ptx::bulk_reduce_add(g_target, s_slot, bytes);
      }
      ptx::bulk_commit();
    }
    __syncwarp();
  }
};

/// One warp of the warpgroup that loads and computes dQ.
template <class Config, class Storage>
class BackwardDqWarp {
 protected:
  static constexpr int kBlockM = Config::kBlockM, kPanels = panels(Config::kHeadDim);
  using DqSlice = BackwardDqSlice<Config>;
  using Sum = typename DqSlice::Sum;

  __device__ __forceinline__ BackwardDqWarp(const BackwardParams& p, const BackwardMaps& maps,
                                            const BackwardWorkspace& workspace, Storage& storage, uint32_t s_tiles,
                                            int warp, int lane)
      : p_(p),
        maps_(maps),
        workspace_(workspace),
        storage_(storage),
        work_tile_(storage.work_tile),
        warp_(warp),
        lane_(lane),
        s_tiles_(s_tiles) {}

  __device__ __forceinline__ void release(const uint64_t& barrier) const { arrive_as_warp(barrier, lane_); }

  /// Loads all of K, or of V.
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, const uint64_t& barrier, int offset) const {
    if (lane_ == 0)
      sm90::load_keys<Config>(p_, map, barrier, s_tiles_ + offset, work_tile_.sequence, work_tile_.first_key, 0,
                              kPanels);
    __syncwarp();
  }

  __device__ __forceinline__ static void finish(Sum& sum) { DqSlice::finish(sum); }
  __device__ __forceinline__ uint32_t s_slice(int panel) const { return DqSlice::slot(s_tiles_, warp_, panel); }
  __device__ __forceinline__ void stage(const Sum& sum, int panel) const { DqSlice::stage(s_slice(panel), sum, lane_); }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const BackwardWorkspace& workspace_;
  Storage& storage_;
  const BackwardWorkTile<Config>& work_tile_;
  const int warp_, lane_;
  const uint32_t s_tiles_;
};

/// Adds the loads of Q and dO to BackwardDqWarp. The first warp issues each as soon as its stage is free.
template <class Config, class Storage>
class BackwardProducer : protected BackwardDqWarp<Config, Storage> {
 protected:
  using Base = BackwardDqWarp<Config, Storage>;
  using Base::Base;
  using Base::kBlockM, Base::lane_, Base::maps_, Base::p_, Base::s_tiles_, Base::storage_, Base::warp_,
      Base::work_tile_, Base::workspace_;
  using Step = BackwardStep;

  __device__ __forceinline__ void load_queries(const Step& step) const {
    const uint32_t stage = at_.stage();
    load_rows(maps_.q, address(storage_.q_full[stage]), Config::kQueriesOffset, workspace_.lse, storage_.lse[stage],
              step);
  }
  __device__ __forceinline__ void load_grads(const Step& step) const {
    const uint32_t stage = at_.stage();
    load_rows(maps_.grad_out, address(storage_.do_full[stage]), Config::kGradsOffset, workspace_.minus_delta,
              storage_.minus_delta[stage], step);
  }
  /// Loads Q and dO of the second step, if there is one.
  __device__ __forceinline__ void load_second(const Step& step) {
    at_.advance();
    if (step.head < work_tile_.heads) {
      load_queries(step);
      load_grads(step);
    }
    at_.count = 0;
  }
  /// Loads the step that comes next in the stages of this one, when they are free.
  __device__ __forceinline__ void load_after(Step step) const {
    for (int k = 0; k < Config::kStages; ++k) work_tile_.advance(step);
    load_in_place(step);
  }
  __device__ __forceinline__ void load_in_place(const Step& step) const {
    if (step.head >= work_tile_.heads) return;
    wait_for(storage_.do_empty[at_.stage()], at_.parity());
    load_grads(step);
    wait_for(storage_.q_empty[at_.stage()], at_.parity());
    load_queries(step);
  }

  __device__ __forceinline__ int64_t workspace_tile(const Step& step) const {
    return work_tile_.workspace_tile + step.head * workspace_.tiles_per_head + step.tile;
  }
  /// Where dQ of this warp's 16 queries begins, for a panel's 64 columns.
  __device__ __forceinline__ float* dq_slice(const Step& step, int panel) const {
    const int64_t row = workspace_tile(step) * kBlockM + warp_ * 16;
    return workspace_.dq + row * Config::kDqHeadDim + panel * (16 * kPanelColumns);
  }

  RingCount<Config::kStages> at_;

 private:
  /// Loads a tile of Q with its lse, or of dO with its D.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t s_full, int offset, const float* terms,
                                            const float* s_terms, const Step& step) const {
    if (lane_ == 0) {
      const Sequence& sequence = work_tile_.sequence;
      ptx::mbarrier_arrive_expect(s_full, Config::kQueryBytes + Config::kTermBytes);
      load_panels(map, s_full, s_tiles_ + offset + at_.stage() * Config::kQueryBytes, kBlockM, 0,
                  panels(Config::kHeadDim), static_cast<int>(sequence.q_begin) + step.tile * kBlockM,
                  sequence.head + step.head, p_.seq.cu_seqlens_q ? 0 : sequence.batch);
      ptx::bulk_load(ptx::shared_address(s_terms), terms + workspace_tile(step) * kBlockM, Config::kTermBytes, s_full);
    }
    __syncwarp();
  }
};

}  // namespace flash_ext::sm90
