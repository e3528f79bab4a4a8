// The end of a work tile: decides whether it needs recomputing, and stores its rows of out and lse.
#pragma once

#include "kernels/common/sanitise.cuh"
#include "kernels/common/score/max_logit.cuh"
#include "kernels/ptx/reread.h"
#include "kernels/sm90/common/row_end.cuh"
#include "kernels/sm90/common/store_rows.cuh"
#include "rows.cuh"
#include "split_kv.cuh"

namespace flash_ext::sm90 {

/// Returns 0 if all elements that the lane holds of its row r are finite, else NaN. It uses four chains of FMAs,
/// because one chain would take a fifth of a step.
template <int kD>
__device__ __forceinline__ float trace_of_row(const float (&out)[kD][4], int r) {
  constexpr int kChains = 4;
  float traces[kChains] = {};
#pragma unroll
  for (int d = 0; d < kD; ++d)
    traces[d % kChains] = fmaf(0.0f, out[d][2 * r], fmaf(0.0f, out[d][2 * r + 1], traces[d % kChains]));
  return traces[0] + traces[1] + (traces[2] + traces[3]);
}

template <class Config>
class ForwardEpilogue : public ForwardRows<Config> {
  using Base = ForwardRows<Config>;

 protected:
  using Base::k_at_, Base::kBlockN, Base::kD, Base::lane_, Base::largest_, Base::out_, Base::p_, Base::q_at_,
      Base::query_tile, Base::row_sum_, Base::s_tiles_, Base::stabiliser_, Base::storage_, Base::v_at_, Base::warp_,
      Base::warpgroup_;

 public:
  using Base::Base;
  using typename Base::Element, typename Base::WorkTile;

 protected:
  /// Records whether a row of this warp overflowed, met Inf or NaN, has a stabiliser beyond FixedStabiliser's limits,
  /// or has no stabiliser though it sees keys. A weight too large for float16 shows only in out, which becomes
  /// non-finite. But a hidden NaN may do that too, and must not change the rounding. So V is sanitised first, and the
  /// safe path follows only if out is still not finite.
  __device__ __forceinline__ void find_failures(WorkTile& work_tile) const {
    const TileCoordinates<false> at = this->coordinates(work_tile, 0);
    bool failed = false, overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at.row(0, 2 * r);
      if (row >= work_tile.end_query) continue;
      const bool met = trace_of_row(out_, r) != 0.0f;
      failed |= met;
      if constexpr (Config::kListsBlocks) {
        overflowed |= has_overflowed(row_sum_[r]) || !FixedStabiliser<Element>::serves(stabiliser_[r]);
      } else {
        const bool too_large = !FixedStabiliser<Element>::serves(stabiliser_[r]);
        overflowed |= has_overflowed(row_sum_[r]);
        overflowed |= sees_keys(work_tile, row) && (stabiliser_[r] == -INFINITY || too_large);
      }
    }
    record_failures(work_tile, failed, overflowed);
  }

  __device__ __forceinline__ static void record_failures(WorkTile& work_tile, bool failed, bool overflowed) {
    if (__any_sync(~0u, failed | overflowed)) work_tile.failed = true;
    if (__any_sync(~0u, overflowed)) work_tile.overflowed = true;
  }

  /// Whether the window lets a row see a key of the work tile.
  __device__ __forceinline__ static bool sees_keys(const WorkTile& work_tile, int row) {
    return max(work_tile.sequence.keys_begin(row), work_tile.tiles.begin * kBlockN) <
           min(work_tile.sequence.keys_end(row), work_tile.tiles.end * kBlockN);
  }

  /// Whether a row's sum has overflowed. `sum` is one lane's share of it: the limit leaves room for the shares of the
  /// row's three other lanes and for a sink.
  __device__ __forceinline__ static bool has_overflowed(float sum) {
    constexpr float kMostSum = 0x1p100f;
    return !(sum <= kMostSum);
  }

  /// Normalises the rows and writes them: through shared memory, or from registers.
  __device__ __forceinline__ void store(const WorkTile& work_tile) {
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    float scale[2], lse[2];
    if (first_row < work_tile.end_query) {
      finish_rows(work_tile, scale, lse);
      if constexpr (Config::kKeepsMaxLogit) raise_max_logit(work_tile, first_row);
    }
    if (work_tile.has_out_slots()) {
      this->wait_for_keys();
      this->wait_for_values();
    }
    if (first_row < work_tile.end_query) {
      const bool copies_out = work_tile.copies_out(warpgroup_) && !work_tile.met_non_finite;
      if (copies_out) {
        const int offset = out_offset<Config>(warpgroup_, q_at_.stage(), k_at_.stage(), v_at_.stage());
        write_out_tile<Element>(s_tiles_ + offset, out_, scale, warp_ * 16,
                                ptx::reread(lane_));  // else values that depend on it take registers in the loops
      } else if (work_tile.partial) {
        store_part(work_tile);
      } else {
        store_rows(work_tile, first_row, scale);
      }
      if (work_tile.publishes(warpgroup_)) publish_out(copies_out);
    }
    if (work_tile.has_rows(warpgroup_)) q_at_.advance();
    if (first_row < work_tile.end_query && !work_tile.partial) store_lse(work_tile, first_row, lse);
    if (work_tile.has_out_slots()) {
      this->release(storage_.k_empty[k_at_.stage()]);
      k_at_.advance();
      this->release_values();
    }
  }

  /// Computes the factor that normalises each row of out, and its lse.
  __device__ __forceinline__ void finish_rows(const WorkTile& work_tile, float (&scale)[2], float (&lse)[2]) const {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = row_sum_[r] + __shfl_xor_sync(~0u, row_sum_[r], 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    RowEnd ends[2];
    if (p_.sink) {
      const float sink = static_cast<const float*>(p_.sink)[work_tile.sequence.head];
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row(stabiliser_[r], sum[r], sink);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) ends[r] = finish_row_approx(stabiliser_[r], sum[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = ends[r].scale;
      lse[r] = ends[r].lse;
    }
  }

  /// Raises the head's max_logit to the largest score of this warp's rows. Rows that overflowed are left out: their
  /// work tile is requeued for the safe path. There a NaN comes from a score, not from an overflow, and counts.
  __device__ __forceinline__ void raise_max_logit(const WorkTile& work_tile, int first_row) const {
    float largest = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      const bool counts = row < work_tile.end_query && (work_tile.safe_path || largest_.of_row[r] < INFINITY);
      if (counts) largest = ptx::max_or_nan(largest, stabiliser_[r] + log2f(largest_.of_row[r]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      largest = ptx::max_or_nan(largest, __shfl_xor_sync(~0u, largest, distance));
    if (lane_ == 0) flash_ext::raise_max_logit(p_, work_tile.sequence, largest * kLn2);
  }

  __device__ __forceinline__ void store_lse(const WorkTile& work_tile, int first_row, const float (&lse)[2]) const {
    float* g_lse = static_cast<float*>(p_.lse.data) + work_tile.sequence.lse_offset(p_.lse);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      if (lane_ % 4 == 0 && row < work_tile.end_query) g_lse[row] = lse[r];
    }
  }

  /// Publishes out to warp 1, which stores it by TMA (producer.cuh).
  __device__ __forceinline__ void publish_out(bool copies_out) {
    storage_.out_is_here[query_tile()] = copies_out;
    // Every thread arrives after its own writes. The warp that starts the copy issues the proxy fence.
    ptx::mbarrier_arrive(address(storage_.out_full[query_tile()]));
  }

  /// Stores the rows of out from registers, in 16-byte chunks.
  __device__ __forceinline__ void store_rows(const WorkTile& work_tile, int first_row, const float (&scale)[2]) const {
    const auto rows = query_rows<Element>(p_.out, work_tile.sequence);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp_ * 16 + 8 * r + lane_ / 4;
      Element* const g_row = row < work_tile.end_query ? rows.row(row) : nullptr;
      write_out_row(g_row, out_, r, scale[r], lane_, static_cast<int>(p_.head_dim_v));
    }
  }

  /// Stores O, stabilisers and sums in the order of the registers, for combine_splits_kernel().
  __device__ __forceinline__ void store_part(const WorkTile& work_tile) const {
    float4* const g_split = SplitTile<Config>::of_lane(work_tile.partial, warpgroup_, warp_, lane_);
#pragma unroll
    for (int d = 0; d < kD; ++d) g_split[d * 32] = float4{out_[d][0], out_[d][1], out_[d][2], out_[d][3]};
    *SplitTile<Config>::state(g_split) = float4{stabiliser_[0], stabiliser_[1], row_sum_[0], row_sum_[1]};
    if (lane_ == 0) *SplitTile<Config>::met_non_finite(g_split, lane_) = work_tile.met_non_finite;
  }

  /// Adds non-finite values of V to the rows that see them. Sanitising removed them because other rows do not.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile) const {
    if constexpr (Config::kScoreOptions) {
      // This variant has no masks; parameters without them save registers in the loops.
      AttentionParams without_masks;
      without_masks.head_dim_v = p_.head_dim_v;
      add_hidden_non_finite(work_tile, without_masks);
    } else {
      add_hidden_non_finite(work_tile, p_);
    }
  }

 private:
  /// The same with the parameters `p`, whose masks say which rows see which keys.
  __device__ __forceinline__ void add_hidden_non_finite(const WorkTile& work_tile, const AttentionParams& p) const {
    const Sequence& sequence = work_tile.sequence;
    const TileSpan tiles = work_tile.rows[warpgroup_];
    const int first_row = work_tile.first_query + warpgroup_ * kWarpgroupRows;
    const auto rows = query_rows<Element>(p_.out, sequence);
    ptx::barrier_any<kWarpgroupThreads>(barrier_of_warpgroup(warpgroup_), false);  // out is written
    add_non_finite<Element, kWarpgroupThreads>(
        p, sequence, rows, key_rows<Element, Config::kReadsCache>(p_, p_.v, sequence), first_row,
        min(first_row + kWarpgroupRows, work_tile.end_query), tiles.begin * kBlockN,
        min(tiles.end * kBlockN, sequence.seqlen_k), 32 * warp_ + ptx::reread(lane_));
  }
};

}  // namespace flash_ext::sm90
