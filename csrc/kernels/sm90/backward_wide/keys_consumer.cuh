// What the warps of both consumer warpgroups share: the query tiles that they visit, sanitising, and P and dS in shared
// memory.
#pragma once

#include "kernels/sm90/common/backward/consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// A warp of either warpgroup.
template <class Config>
class BackwardWideKeysConsumer : protected BackwardKeysConsumer<Config, BackwardWideStorage<Config>> {
 protected:
  using Storage = BackwardWideStorage<Config>;
  using Base = BackwardKeysConsumer<Config, Storage>;
  using Base::at_, Base::s_tiles_, Base::storage_, Base::work_tile_;
  using typename Base::Products, typename Base::Sum, typename Base::Tile, typename Base::Weights;

  __device__ __forceinline__ BackwardWideKeysConsumer(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                      Storage& storage, uint32_t s_tiles, int keys_offset, float scale,
                                                      int rank, int lane)
      : Base(p, storage, s_tiles, keys_offset, scale, rank, lane), workspace_(workspace) {}

  /// Calls step(at) for the query tiles that see this CTA's keys, and skip(at) for those that see only the other CTA's
  /// keys. A skip still waits for the barriers, so that no warpgroup gets two phases ahead. `at` is the number of a
  /// tile or, with options, a BackwardWideStep.
  template <class Step, class Skip>
  __device__ __forceinline__ void visit_heads(Step step, Skip skip) {
    if constexpr (Config::kHasOptions) {
#pragma unroll 1
      while (true) {
        this->wait_for_query();
        const BackwardWideStep at = storage_.steps[at_.stage()];
        if (at.head >= work_tile_.heads) return;
        this->sees(at.tile) ? step(at) : skip(at);
      }
    } else if constexpr (Config::kTurns == TurnTaking::kAlways) {
      visit_in_turns(step, skip);
    } else {
#pragma unroll 1
      for (int head = 0; head < work_tile_.heads; ++head) visit_head(step, skip);
    }
  }

  /// Sanitises Q and dO of a step that hides pairs; `first`: this warpgroup's first thread among those that sanitise.
  template <class At>
  __device__ __forceinline__ void sanitise_queries(const At& at, int first) {
    if (!is_sanitised(at)) return;
    this->sanitise_rows(first + this->thread());
    this->release(storage_.sanitised);
    wait_for(storage_.sanitised, sanitised_parity_);
    sanitised_parity_ ^= 1;
  }

  /// sum_ += weights rows
  __device__ __forceinline__ void add_up(const Weights& weights, uint32_t rows) {
    Products::start_sum(sum_, weights, rows);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(sum_);
  }

  /// The lane's row of this warp's P, and then dS, in shared memory.
  __device__ __forceinline__ uint32_t s_weights() const {
    return Tile::row_of_lane(s_tiles_ + Config::kDsOffset, Base::warp_, Base::lane_);
  }
  __device__ __forceinline__ void publish_p() const { this->release(storage_.p_full); }
  __device__ __forceinline__ void publish_ds() const {
    ptx::fence_proxy_async_shared();
    this->release(storage_.ds_full);
  }

  const BackwardWorkspace& workspace_;
  Sum sum_;  // dV or dK

 private:
  uint32_t sanitised_parity_ = 0;

  __device__ __forceinline__ bool is_sanitised(int tile) const { return work_tile_.is_sanitised(tile); }
  __device__ __forceinline__ bool is_sanitised(const BackwardWideStep& at) const { return at.is_sanitised; }

  template <class Step, class Skip>
  __device__ __forceinline__ void visit_head(Step step, Skip skip) {
    const TileSpan& seen = work_tile_.groups[Base::warpgroup_];
    const bool sees = seen.begin < seen.end;
    int tile = work_tile_.tiles.begin;
#pragma unroll 1
    for (const int end = sees ? seen.begin : work_tile_.tiles.end; tile < end; ++tile) skip(tile);
    if (!sees) return;
#pragma unroll 1
    for (; tile < seen.end; ++tile) step(tile);
#pragma unroll 1
    for (; tile < work_tile_.tiles.end; ++tile) skip(tile);
  }
  /// Visits tiles from the last to the first one, all heads of a tile before the next tile.
  template <class Step, class Skip>
  __device__ __forceinline__ void visit_in_turns(Step step, Skip skip) {
    const TileSpan& seen = work_tile_.groups[Base::warpgroup_];
    const int seen_begin = seen.begin, seen_end = max(seen.end, seen_begin);
#pragma unroll 1
    for (int tile = work_tile_.tiles.end - 1; tile >= work_tile_.tiles.begin; --tile)
#pragma unroll 1
      for (int head = 0; head < work_tile_.heads; ++head) {
        const bool sees = tile >= seen_begin && tile < seen_end;
        sees ? step(tile) : skip(tile);
      }
  }
};

}  // namespace flash_ext::sm90
