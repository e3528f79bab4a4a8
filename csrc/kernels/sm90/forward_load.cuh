// The warps that bring work and tiles to those that compute: one takes up work, one loads Q, one K and V, and one frees
// V of Inf and NaN where they are hidden.
#pragma once

#include <new>

#include "../common/non_finite.cuh"
#include "../ptx/tma.h"
#include "forward_work.cuh"

namespace flash_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
};

template <class Config>
class ForwardLoader {
 public:
  using State = ForwardState<Config>;
  using Work = ForwardWork<Config>;
  static constexpr int kPanels = panels(Config::kHeadDim);

  __device__ __forceinline__ ForwardLoader(const ForwardParams& p, const ForwardMaps& maps, State& state, char* tiles,
                                           int lane)
      : p_(p),
        maps_(maps),
        state_(state),
        s_q_(ptx::shared_address(tiles)),
        s_k_(s_q_ + Config::kGroups * Config::kQueryBytes),
        s_v_(s_k_ + Config::kStages * Config::kTileBytes),
        v_(reinterpret_cast<uint4*>(tiles + Config::kTilesBytes - Config::kStages * Config::kTileBytes)),
        lane_(lane) {}

  /// Fills the slots with the works of this block. By one thread.
  __device__ __forceinline__ void schedule_work(const ForwardSchedule& schedule) {
    RingPosition<Config::kSlots> at;
    uint32_t loaded = 0;
    const int heads_q = static_cast<int>(p_.heads_q);
    for (int64_t position = blockIdx.x; position < schedule.size(); position = schedule.take()) {
      int head, block;
      schedule.locate(position, head, block);
      const Sequence sequence(p_, head / heads_q, head % heads_q);
      // The tile that is no whole one stands first, where a causal mask leaves the fewest keys.
      const int blocks = (sequence.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
      const int end_query = sequence.seqlen_q - (blocks - 1 - block) * Config::kBlockM;
      if (block >= blocks) continue;
      begin_slot(at);
      new (&state_.work_in(at.stage)) Work(sequence, max(end_query - Config::kBlockM, 0), end_query);
      end_slot(at, true);
      ptx::mbarrier_wait(address(state_.work_loaded), loaded);
      loaded ^= 1;
    }
    begin_slot(at);
    end_slot(at, false);
  }

  /// Q of each warpgroup as soon as the warpgroup has done with the one before.
  __device__ __forceinline__ void load_queries() {
    WorkQueue<Config> queue(state_);
    uint32_t parities = 0;  // bit g: of q_empty[g]
    while (const Work* const work = queue.front()) {
#pragma unroll
      for (int g = 0; g < Config::kGroups; ++g) {
        if (work->rows[g].begin == work->rows[g].end) continue;
        ptx::mbarrier_wait(address(state_.q_empty[g]), (parities >> g & 1) ^ 1);
        parities ^= 1u << g;
        if (lane_ == 0) {
          const Sequence& s = work->sequence;
          load(maps_.q, address(state_.q_full[g]), s_q_ + g * Config::kQueryBytes, kGroupRows,
               static_cast<int>(s.q_begin) + work->first_query + g * kGroupRows, s.head, s.batch, p_.seq.cu_seqlens_q);
        }
        __syncwarp();  // no lane falls behind by phases, whose parity repeats
      }
      queue.pop(lane_);
    }
  }

  /// K and V of all tiles, from the last to the first.
  __device__ __forceinline__ void load_keys() {
    WorkQueue<Config> queue(state_);
    RingPosition<Config::kStages> at;
    while (const Work* const work = queue.front()) {
      const Sequence& s = work->sequence;
      const int begin = work->tiles.begin, first_row = static_cast<int>(s.k_begin);
      for (int tile = work->tiles.end - 1; tile >= begin; --tile, at.advance()) {
        const int row = first_row + tile * Config::kBlockN;
        const uint32_t s_offset = at.stage * Config::kTileBytes;
        ptx::mbarrier_wait(address(state_.k_empty[at.stage]), at.parity ^ 1);
        if (lane_ == 0) {
          load(maps_.k, address(state_.k_full[at.stage]), s_k_ + s_offset, Config::kBlockN, row, s.head_kv, s.batch,
               p_.seq.cu_seqlens_k);
        }
        ptx::mbarrier_wait(address(state_.v_empty[at.stage]), at.parity ^ 1);
        if (lane_ == 0) {
          load(maps_.v, address(state_.v_full[at.stage]), s_v_ + s_offset, Config::kBlockN, row, s.head_kv, s.batch,
               p_.seq.cu_seqlens_k);
        }
        __syncwarp();
      }
      if (lane_ == 0) ptx::mbarrier_arrive(address(state_.work_loaded));
      queue.pop(lane_);
    }
  }

  /// Takes Inf and NaN out of V of partial tiles: a hidden weight is 0, and 0 * Inf is NaN.
  __device__ __forceinline__ void clean_values() {
    WorkQueue<Config> queue(state_);
    RingPosition<Config::kStages> at, clean;
    while (const Work* const work = queue.front()) {
      const int begin = work->tiles.begin;
      for (int tile = work->tiles.end - 1; tile >= begin; --tile, at.advance()) {
        // For each tile, and letting go of each: the parity cannot tell a phase from the one before the last.
        ptx::mbarrier_wait(address(state_.v_full[at.stage]), at.parity);
        if (work->is_partial(tile)) {
          const bool found = take_out_non_finite(v_ + at.stage * (Config::kTileBytes / 16));
          const bool any = __any_sync(~0u, found);
          __syncwarp();  // what all lanes wrote comes before the arrival
          if (lane_ == 0) {
            state_.met_non_finite[clean.stage] = any;
            ptx::mbarrier_arrive(address(state_.v_clean[clean.stage]));
          }
          clean.advance();
        }
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(address(state_.v_empty[at.stage]));
      }
      queue.pop(lane_);
    }
  }

 private:
  __device__ __forceinline__ static uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

  __device__ __forceinline__ void begin_slot(const RingPosition<Config::kSlots>& at) const {
    ptx::mbarrier_wait(address(state_.work_empty[at.stage]), at.parity ^ 1);
  }
  __device__ __forceinline__ void end_slot(RingPosition<Config::kSlots>& at, bool has_work) const {
    state_.has_work[at.stage] = has_work;
    ptx::mbarrier_arrive(address(state_.work_full[at.stage]));
    at.advance();
  }

  /// Rows from `row` on of a head. Packed sequences are one batch entry.
  __device__ __forceinline__ void load(const CUtensorMap& map, uint32_t s_barrier, uint32_t s_tile, int rows, int row,
                                       int head, int batch, bool packed) const {
    ptx::mbarrier_arrive_expect(s_barrier, kPanels * panel_bytes(rows));
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      ptx::tma_load(s_tile + panel * panel_bytes(rows), &map, s_barrier, panel * kPanelColumns, row, head,
                    packed ? 0 : batch);
  }

  /// True if this lane found some.
  __device__ __forceinline__ bool take_out_non_finite(uint4* s_tile) const {
    using Test = NonFinite<typename Config::Element>;
    constexpr int kPieces = Config::kTileBytes / 16;
    uint32_t found = 0;
#pragma unroll 2
    for (int at = lane_; at < kPieces; at += 32) {
      const uint4 piece = s_tile[at];
      found |= Test::in_word(piece.x) | Test::in_word(piece.y) | Test::in_word(piece.z) | Test::in_word(piece.w);
    }
    if (!found) return false;
#pragma unroll 1
    for (int at = lane_; at < kPieces; at += 32) {
      const uint4 piece = s_tile[at];
      s_tile[at] = {Test::without(piece.x), Test::without(piece.y), Test::without(piece.z), Test::without(piece.w)};
    }
    ptx::fence_proxy_async_shared();
    return true;
  }

  const ForwardParams& p_;
  const ForwardMaps& maps_;
  State& state_;
  const uint32_t s_q_, s_k_, s_v_;
  uint4* const v_;
  const int lane_;
};

}  // namespace flash_ext::sm90
