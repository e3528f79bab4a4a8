// Copies of Q, K and V to shared memory, which all warps issue, and the waits for them.
#pragma once

#include "kernels/common/mask/tile_range.h"
#include "kernels/ptx/barrier.h"
#include "warp.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct ForwardLoads : ForwardWarp<Config> {
  using Base = ForwardWarp<Config>;
  using Base::Base;
  using Base::copying_thread, Base::kBlockM, Base::kBlockN, Base::kHeadDim, Base::kM, Base::kSteps, Base::kThreads,
      Base::lane, Base::options, Base::p, Base::phase, Base::r_q, Base::rows, Base::s_k, Base::s_q, Base::s_v,
      Base::seeds, Base::seen, Base::stage, Base::warp_row, Base::work_tile;
  using typename Base::Element, typename Base::Products;

  __device__ __forceinline__ void load_query(const ForwardWorkTile<Config>& work_tile, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockM>(s_q, query_rows<Element>(p.q, work_tile.sequence),
                                                    work_tile.first_query, work_tile.sequence.seqlen_q,
                                                    static_cast<int>(p.head_dim), thread);
  }
  /// What the copies of a step read from shared memory. It is read before a wait, which hides the latency.
  struct Source {
    RowSource<Element, Config::kReads> rows;
    int seqlen_k;
  };
  __device__ __forceinline__ Source keys_of(const ForwardWorkTile<Config>& work_tile) const {
    return {with_known(work_tile.keys, p.k), work_tile.sequence.seqlen_k};
  }
  __device__ __forceinline__ Source values_of(const ForwardWorkTile<Config>& work_tile) const {
    return {with_known(work_tile.values, p.v), work_tile.sequence.seqlen_k};
  }
  /// Fills in what constant memory knows, so that it need not be read from shared memory.
  template <class Rows>
  __device__ __forceinline__ Rows with_known(Rows rows, const TensorView& view) const {
    rows.row_stride = view.row_stride;
    if constexpr (Config::kReads) {
      if (!p.seq.block_table) rows.pages = nullptr;
    }
    return rows;
  }

  __device__ __forceinline__ void load_key(const Source& source, int tile, int steps_ahead, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_k, steps_ahead), source.rows, tile * kBlockN,
                                                    source.seqlen_k, static_cast<int>(p.head_dim), thread);
  }
  __device__ __forceinline__ void load_value(const Source& source, int tile, int steps_ahead, int thread) const {
    load_tile<Element, kHeadDim, kThreads, kBlockN>(stage(s_v, steps_ahead), source.rows, tile * kBlockN,
                                                    source.seqlen_k, static_cast<int>(p.head_dim_v), thread);
  }

  __device__ __forceinline__ void query_fragments(int step, typename Products::A (&a)[kM]) const {
    const uint32_t s_lane = s_q + Products::lane_a(lane);
#pragma unroll
    for (int m = 0; m < kM; ++m) Products::load_a(a[m], s_lane, warp_row + 16 * m, step);
  }

  /// Waits for copies under way, except V's in the first step without masks, and finds the next tile to visit. Then
  /// starts copies: with one stage, of this step's V, unless it is the first step; with two, of the next K and V.
  __device__ __forceinline__ int begin_step(int tile, bool first, int last_tile) {
    const Source keys = keys_of(work_tile), values = values_of(work_tile);
    options().share_random_bits(seeds, tile);
    if (!Config::kMasks && first) {
      ptx::cp_async_wait<1>();  // for Q and K
    } else {
      ptx::cp_async_wait<0>();
    }
    const int next = options().find(tile - 1, last_tile, seen);
    if constexpr (Config::kStages == 1) {
      if (!first) load_value(values, tile, 0, copying_thread());
    } else if (next >= last_tile) {
      load_key(keys, next, 1, copying_thread());
      load_value(values, next, 1, copying_thread());
    }
    ptx::cp_async_commit();
    return next;
  }

  /// Releases K(n) when Q K(n)^T is done: with one stage, waits for V(n) and starts the copy of the next K. Warps call
  /// it from either kind of step.
  __device__ __forceinline__ void release_key(int next) const {
    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync<kAllWarps, kThreads>();
      if (next >= work_tile.tiles.begin) load_key(keys_of(work_tile), next, 1, copying_thread());
      ptx::cp_async_commit();
    }
  }

  /// Starts the copies of Q and of the first tiles of K, V and the bias, which do not have to wait for anybody.
  /// `work_tile` need not lie in shared memory yet.
  __device__ __forceinline__ void begin(const ForwardWorkTile<Config>& work_tile, int tile) {
    if (tile < work_tile.tiles.begin) return;
    const int thread = ptx::reread(static_cast<int>(threadIdx.x));
    load_query(work_tile, thread);
    load_key(keys_of(work_tile), tile, 0, thread);
    options().load_bias(work_tile, tile);
    ptx::cp_async_commit();
    load_value(values_of(work_tile), tile, 0, thread);
    ptx::cp_async_commit();
    if constexpr (Config::kQueryInRegisters) {
      ptx::cp_async_wait<1>();
      __syncthreads();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragments(step, r_q[step]);
    }
  }
};

}  // namespace flash_ext::sm80
