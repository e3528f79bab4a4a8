// The warpgroups that compute scores and their gradients, dK and dV: 64 keys each.
#pragma once

#include "kernels/sm90/common/backward/consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// One warp of them.
template <class Config, class Storage = BackwardStorage<Config>>
class BackwardConsumer : protected BackwardKeysConsumer<Config, Storage> {
 public:
  using Base = BackwardKeysConsumer<Config, Storage>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Sum, typename Base::Tile,
      typename Base::Weights;

  __device__ __forceinline__ BackwardConsumer(const BackwardParams& p, Storage& storage, uint32_t s_tiles, float scale,
                                              int group, int lane)
      : Base(p, storage, s_tiles, group * panel_bytes(kWarpgroupRows), scale, group, lane) {}

  __device__ __forceinline__ void run() {
    zero_sums();
    if (work_tile_.tiles.begin < work_tile_.tiles.end) {
      this->sanitise_keys();
      visit_all();
    }
    this->store_dv(dv_, 1.0f);
    this->store_dk(dk_, static_cast<float>(p_.softmax_scale));
  }

 protected:
  using Base::at_, Base::kValues, Base::lane_, Base::p_, Base::s_tiles_, Base::storage_, Base::warp_, Base::warpgroup_,
      Base::work_tile_;

  __device__ __forceinline__ void zero_sums() {
    zero_accumulators(dk_);
    zero_accumulators(dv_);
  }

  __device__ __forceinline__ void visit_all() {
    if constexpr (Config::kTurns == TurnTaking::kAlways) {
#pragma unroll 1
      for (BackwardStep step = work_tile_.first_step(); step.head < work_tile_.heads; work_tile_.advance(step))
        visit(step.tile);
    } else {
#pragma unroll 1
      for (int head = 0, tile = work_tile_.tiles.begin;;) {
        visit(tile);
        if (++tile < work_tile_.tiles.end) continue;
        tile = work_tile_.tiles.begin;
        if (++head == work_tile_.heads) break;
      }
    }
  }

  __device__ __forceinline__ void visit(int tile) {
    if (work_tile_.is_sanitised(tile)) sanitise_rows();
    if (this->sees(tile)) {
      step(tile, this->hides(tile));
    } else {
      skip_tile();
    }
    at_.advance();
  }

  /// Skips a tile that only other warpgroups see. It still waits for the barriers, so that no warpgroup gets two phases
  /// ahead.
  __device__ __forceinline__ void skip_tile() const {
    this->wait_for_query();
    this->release_query();
    this->wait_for_grad();
    this->release_grad();
    wait_for_ds_room();
    this->zero_ds(s_ds());
    publish_ds();
  }

  /// One step. `hides`: some pair of the tile is hidden. S and dP take the same registers, one after the other.
  __device__ __forceinline__ void step(int tile, bool hides) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::multiply(s, Base::keys_, this->query_tile());
    this->softmax_step(s);
    if (hides) this->hide_weights(s, tile);
    pack_operand<Element>(p, s);

    multiply_grads(s);
    this->compute_ds(ds, s, p, hides);
    publish(ds);
    add_up(p, ds, [] {});
  }

  /// dP
  __device__ __forceinline__ void multiply_grads(Scores& s) const {
    multiply_grads(s, [] {});
  }
  /// dP, with meanwhile() beside the product.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_grads(Scores& s, Meanwhile meanwhile) const {
    wait_for(storage_.v_full, 0);
    this->wait_for_grad();
    Products::start(s, Base::keys_ + kValues, this->grad_tile());
    meanwhile();
    Products::finish(s);
  }

  /// dV += P dO and dK += dS Q, issued together, with meanwhile() beside them. Both are complete on return.
  template <class Meanwhile>
  __device__ __forceinline__ void add_up(const Weights& p, const Weights& ds, Meanwhile meanwhile) {
    Products::start_sum(dv_, p, this->grad_tile());
    Products::start_sum(dk_, ds, this->query_tile());
    meanwhile();
    ptx::wgmma_wait<1>();
    ptx::fence_operand(dv_);
    this->release_grad();
    ptx::wgmma_wait<0>();
    ptx::fence_operand(dk_);
    this->release_query();
  }

  /// Of this warpgroup's keys.
  __device__ __forceinline__ uint32_t s_ds() const {
    return s_tiles_ + Config::kDsOffset + at_.stage() * Config::kDsBytes + warpgroup_ * Config::kDsPanelBytes;
  }
  __device__ __forceinline__ void wait_for_ds_room() const {
    wait_for(storage_.ds_empty[at_.stage()], at_.parity() ^ 1);
  }
  __device__ __forceinline__ void publish(const Weights& ds) const {
    wait_for_ds_room();
    Tile::store(Tile::row_of_lane(s_ds(), warp_, lane_), ds);
    publish_ds();
  }
  __device__ __forceinline__ void publish_ds() const {
    ptx::fence_proxy_async_shared();
    this->release(storage_.ds_full[at_.stage()]);
  }

  __device__ __forceinline__ void sanitise_rows() const {
    Base::sanitise_rows(warpgroup_ * kWarpgroupThreads + this->thread());
    ptx::barrier_sync<BackwardBarriers<Config>::kRowsSanitised, Base::kConsumerThreads>();
  }

  Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
