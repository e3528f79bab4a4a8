// The producer warps: three find score tiles and load their row terms, one loads slabs.
#pragma once

#include <new>

#include "kernels/common/sequence.cuh"
#include "kernels/ptx/tma.h"
#include "storage.cuh"

namespace flash_ext::sm90 {

struct BiasMaps {
  CUtensorMap q, k, v, grad_out;
};

template <class Config>
class BiasProducer {
 public:
  using Storage = BiasStorage<Config>;

  __device__ __forceinline__ BiasProducer(const BackwardParams& p, const BiasMaps& maps,
                                          const BiasWorkTiles& work_tiles, Storage& storage, uint32_t s_slabs, int lane)
      : p_(p), maps_(maps), work_tiles_(work_tiles), storage_(storage), s_slabs_(s_slabs), lane_(lane) {}

  /// Finds the score tiles with a visible pair, and fills the slot of every kFinders-th step. Called by warp `finder`
  /// of kFinders.
  __device__ __forceinline__ void find_steps(const float* delta, uint32_t finder) {
    RingCount<Config::kSlots> at;
    for (int work_tile = blockIdx.x; work_tile < work_tiles_.count; work_tile += gridDim.x) {
      const BiasTiles& tiles = work_tiles_.tiles;
      const uint32_t chunk = work_tiles_.chunk(work_tile);
      // It lies in shared memory, because a finder has few registers.
      ScoreTiles& score_tiles = *reinterpret_cast<ScoreTiles*>(storage_.score_tiles[finder]);
      if (lane_ == 0) new (&score_tiles) ScoreTiles(p_, tiles, work_tiles_.tile(work_tile), chunk);
      __syncwarp();
      while (score_tiles.any()) {
        if (is_visible(score_tiles)) add(at, finder, [&] { fill_slot(at.stage(), score_tiles, delta); });
        __syncwarp();
        if (lane_ == 0) score_tiles.next(p_, tiles, chunk);
        __syncwarp();
      }
      add(at, finder, [&] {
        if (lane_ == 0) storage_.steps[at.stage()].ends_work_tiles = true;
      });
    }
  }

  /// Loads the slabs of all score tiles. Called by one warp.
  __device__ __forceinline__ void load_slabs() {
    RingCount<Config::kSlots> at;
    RingCount<Config::kStages> stage;
    for (int work_tile = blockIdx.x; work_tile < work_tiles_.count; work_tile += gridDim.x) {
      while (true) {
        wait_for(storage_.step_full[at.stage()], at.parity());
        const BiasStep step = storage_.steps[at.stage()];
        const bool ends_work_tiles = step.ends_work_tiles;
        if (!ends_work_tiles) {
          for (int slab = 0; slab < Config::kSlabs; ++slab) load_pair(stage, maps_.q, maps_.k, step, slab);
          for (int slab = 0; slab < Config::kSlabs; ++slab) load_pair(stage, maps_.grad_out, maps_.v, step, slab);
        }
        // An arrival does not wait for loads in flight. So it comes after the loaded values have been used.
        arrive_as_warp(storage_.step_empty[at.stage()], lane_);
        at.advance();
        if (ends_work_tiles) break;
      }
    }
  }

 private:
  /// Adds the next step: if it is this finder's turn, fill() writes its slot.
  template <class Fill>
  __device__ __forceinline__ void add(RingCount<Config::kSlots>& at, uint32_t finder, Fill fill) const {
    if (at.count % Config::kFinders == finder) {
      wait_for(storage_.step_empty[at.stage()], at.parity() ^ 1);
      fill();
      arrive_as_warp(storage_.step_full[at.stage()], lane_);
    }
    at.advance();
  }

  /// Whether some pair of the tile is visible.
  __device__ __forceinline__ bool is_visible(const ScoreTiles& score_tiles) const {
    const Sequence sequence(p_, score_tiles.entry(), score_tiles.head_q());
    const int first_query = score_tiles.query_tile() * Config::kRows,
              first_key = score_tiles.key_tile() * Config::kKeys;
    const Interval keys = visible_keys(first_query, min(first_query + Config::kRows, sequence.seqlen_q),
                                       sequence.seqlen_k, sequence.window());
    return first_key < keys.end && first_key + Config::kKeys > keys.begin;
  }

  __device__ __forceinline__ void fill_slot(uint32_t slot, const ScoreTiles& score_tiles, const float* delta) const {
    constexpr int kRows = Config::kRows, kKeys = Config::kKeys;
    const Sequence sequence(p_, score_tiles.entry(), score_tiles.head_q());
    const int first_query = score_tiles.query_tile() * kRows, first_key = score_tiles.key_tile() * kKeys;
    const Interval every =
        common_keys(first_query, min(first_query + kRows, sequence.seqlen_q), sequence.seqlen_k, sequence.window());
    if (lane_ == 0) {
      BiasStep& step = storage_.steps[slot];
      step.ends_work_tiles = false;
      step.all_visible =
          first_query + kRows <= sequence.seqlen_q && every.begin <= first_key && first_key + kKeys <= every.end;
      step.batch = sequence.batch;
      step.head = sequence.head;
      step.first_query = first_query;
      step.first_key = first_key;
      step.q_row = static_cast<int>(sequence.q_begin) + first_query;
      step.k_row = static_cast<int>(sequence.k_begin) + sequence.leftpad + first_key;
      step.q_batch = p_.seq.cu_seqlens_q ? 0 : sequence.batch;
      step.k_batch = p_.seq.cu_seqlens_k ? 0 : sequence.cache_row;
      step.head_kv = sequence.head_kv;
    }
    const float* const g_lse = static_cast<const float*>(p_.lse.data) + sequence.lse_offset(p_.lse);
    const float* const g_delta = delta + row_of_head(p_, sequence, 0);
#pragma unroll
    for (int row = lane_; row < kRows; row += 32) {
      const int i = first_query + row;
      const bool there = i < sequence.seqlen_q;
      storage_.lse[slot][row] = there ? BaseTwoUnit::lse_with_slack(g_lse[i]) : -INFINITY;
      storage_.delta[slot][row] = there ? g_delta[i] : 0.0f;
    }
  }

  /// Loads a slab of Q and one of K, or a slab of dO and one of V.
  __device__ __forceinline__ void load_pair(RingCount<Config::kStages>& at, const CUtensorMap& row_map,
                                            const CUtensorMap& key_map, const BiasStep& step, int slab) const {
    wait_for(storage_.slab_empty[at.stage()], at.parity() ^ 1);
    if (lane_ == 0) {
      const uint32_t s_full = address(storage_.slab_full[at.stage()]);
      const uint32_t s_rows = s_slabs_ + at.stage() * Config::kStageBytes;
      const int column = slab * kPanelColumns;
      ptx::mbarrier_arrive_expect(s_full, Config::kStageBytes);
      ptx::tma_load(s_rows, &row_map, s_full, column, step.q_row, step.head, step.q_batch);
      ptx::tma_load(s_rows + Config::kRowBytes, &key_map, s_full, column, step.k_row, step.head_kv, step.k_batch);
    }
    __syncwarp();
    at.advance();
  }

  const BackwardParams& p_;
  const BiasMaps& maps_;
  const BiasWorkTiles& work_tiles_;
  Storage& storage_;
  const uint32_t s_slabs_;
  const int lane_;
};

}  // namespace flash_ext::sm90
