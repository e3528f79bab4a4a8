// The consumer warpgroups for head dims above 128, where dK or dV alone fills the registers of a warpgroup. For a CTA's
// 64 keys one warpgroup computes S, P and dV, the other dP, dS and dK.
#pragma once

#include "kernels/sm90/common/backward/consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// What the warps of both warpgroups share.
template <class Config>
class BackwardWideKeysConsumer : protected BackwardKeysConsumer<Config, BackwardWideStorage<Config>> {
 protected:
  using Storage = BackwardWideStorage<Config>;
  using Base = BackwardKeysConsumer<Config, Storage>;
  using Base::at_;
  using Base::Base;
  using Base::p_, Base::s_tiles_, Base::storage_, Base::work_tile_;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Sum, typename Base::Tile,
      typename Base::Weights;

  /// Calls step(tile) for the query tiles that see this CTA's keys, and skip(tile) for those that see only the other
  /// CTA's keys. A skip still waits for the barriers, so that no warpgroup gets two phases ahead.
  template <class Step, class Skip>
  __device__ __forceinline__ void visit_heads(Step step, Skip skip) {
    if constexpr (Config::kTurns == TurnTaking::kAlways) {
      visit_in_turns(step, skip);
    } else {
#pragma unroll 1
      for (int head = 0; head < work_tile_.heads; ++head) visit_head(step, skip);
    }
  }

  /// Sanitises Q and dO of a partial tile; `first`: this warpgroup's first thread among those that sanitise.
  __device__ __forceinline__ void sanitise_queries(int tile, int first) {
    if (!work_tile_.is_sanitised(tile)) return;
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

  Sum sum_;  // dV or dK

 private:
  uint32_t sanitised_parity_ = 0;

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

/// A consumer warp of S, P and dV.
template <class Config>
class BackwardWideValues : BackwardWideKeysConsumer<Config> {
 public:
  using Base = BackwardWideKeysConsumer<Config>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Storage,
      typename Base::Tile, typename Base::Weights;

  __device__ __forceinline__ BackwardWideValues(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                                float scale, int rank, int lane)
      : Base(p, storage, s_tiles, 0, scale, rank, lane) {}

  __device__ __forceinline__ void run() {
    zero_accumulators(sum_);
    sanitise_keys();  // waits for K, too: TMA must not outlive the CTA
    this->visit_heads([&](int tile) { step<true>(tile); }, [&](int tile) { step<false>(tile); });
    this->store_dv(sum_, 1.0f);
  }

 private:
  using Base::at_, Base::storage_, Base::sum_;

  /// One step. Without kSees, the tile sees only keys of the other CTA. Releasing Q releases lse, too, so P is stored
  /// before.
  template <bool kSees>
  __device__ __forceinline__ void step(int tile) {
    Weights p;
    this->sanitise_queries(tile, 0);
    this->wait_for_query();
    if constexpr (kSees) softmax_tile(p, tile);
    wait_for_p_room();
    if constexpr (kSees) Tile::store(this->s_weights(), p);
    this->release_query();
    this->publish_p();
    this->wait_for_grad();
    if constexpr (kSees) this->add_up(p, this->grad_tile());
    this->release_grad();
    at_.advance();
  }

  __device__ __forceinline__ void softmax_tile(Weights& p, int tile) const {
    Scores s;
    Products::multiply(s, Base::keys_, this->query_tile());
    this->softmax_step(s);
    if (this->hides(tile)) this->hide_weights(s, tile);
    pack_operand<Element>(p, s);
  }

  __device__ __forceinline__ void wait_for_p_room() const { wait_for(storage_.ds_empty, at_.count % 2 ^ 1); }

  /// Sanitises K. All warps of the warpgroup have done so on return.
  __device__ __forceinline__ void sanitise_keys() const {
    wait_for(storage_.k_full, 0);
    sanitise_tile<Element, Config::kKeyBytes, kWarpgroupThreads>(Base::s_tiles_, this->thread());
    ptx::barrier_any<kWarpgroupThreads>(BackwardBarriers<Config>::keys_sanitised(0), false);
  }
};

/// A consumer warp of dP, dS and dK.
template <class Config>
class BackwardWideGradients : BackwardWideKeysConsumer<Config> {
 public:
  using Base = BackwardWideKeysConsumer<Config>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Storage,
      typename Base::Tile, typename Base::Weights;

  __device__ __forceinline__ BackwardWideGradients(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                                   float scale, int rank, int lane)
      : Base(p, storage, s_tiles, Config::kValuesOffset, scale, rank, lane) {}

  __device__ __forceinline__ void run() {
    zero_accumulators(sum_);
    sanitise_keys();
    this->visit_heads([&](int tile) { step<true>(tile); }, [&](int tile) { step<false>(tile); });
    this->store_dk(sum_, static_cast<float>(Base::p_.softmax_scale));
  }

 private:
  using Base::at_, Base::storage_, Base::sum_;

  /// One step, as above. Releasing dO releases D, too, so dS is stored before. dS takes the registers and the place of
  /// P.
  template <bool kSees>
  __device__ __forceinline__ void step(int tile) {
    Scores dp;
    Weights weights;
    this->sanitise_queries(tile, kWarpgroupThreads);
    this->wait_for_grad();
    if constexpr (kSees) Products::multiply(dp, Base::keys_, this->grad_tile());
    wait_for_p();
    if constexpr (kSees) {
      const uint32_t s_weights = this->s_weights();
      Tile::load(weights, s_weights);
      this->compute_ds(weights, dp, weights, this->hides(tile));
      Tile::store(s_weights, weights);
    } else {
      this->zero_ds(Base::s_tiles_ + Config::kDsOffset);
    }
    this->release_grad();
    this->publish_ds();
    this->wait_for_query();
    if constexpr (kSees) this->add_up(weights, this->query_tile());
    this->release_query();
    at_.advance();
  }

  __device__ __forceinline__ void wait_for_p() const { wait_for(storage_.p_full, at_.count % 2); }

  /// Sanitises the part of the other CTA's K that dQ needs. On return V is there, too.
  __device__ __forceinline__ void sanitise_keys() const {
    wait_for(storage_.other_k_full, 0);
    sanitise_tile<Element, Config::kOtherPanels * panel_bytes(kWarpgroupRows), kWarpgroupThreads>(
        Base::s_tiles_ + Config::kOtherKeysOffset, this->thread());
    wait_for(storage_.v_full, 0);
  }
};

}  // namespace flash_ext::sm90
