// dK and dV of a consumer warpgroup's 64 keys: the products that take a step's weights, and dS on its way through
// shared memory to the warpgroup that computes dQ.
#pragma once

#include "kernels/sm90/common/backward/consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// A consumer warp.
template <class Config>
class BackwardKeyGradients : protected BackwardKeysConsumer<Config, BackwardOptionsStorage<Config>> {
 public:
  using Storage = BackwardOptionsStorage<Config>;
  using Base = BackwardKeysConsumer<Config, Storage>;
  using typename Base::Products, typename Base::Scores, typename Base::Sum, typename Base::Tile, typename Base::Weights;

  /// Passes no scale of scores: the storage's options have it.
  __device__ __forceinline__ BackwardKeyGradients(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                                  int group, int lane)
      : Base(p, storage, s_tiles, group * panel_bytes(kWarpgroupRows), 0.0f, group, lane) {}

 protected:
  using Base::at_, Base::kValues, Base::lane_, Base::p_, Base::s_tiles_, Base::storage_, Base::warp_, Base::warpgroup_;

  __device__ __forceinline__ void zero_sums() {
    zero_accumulators(dk_);
    zero_accumulators(dv_);
  }
  /// Stores dK and dV. `keep_scale`: as in the workspace.
  __device__ __forceinline__ void store_sums(float keep_scale) const {
    this->store_dv(dv_, keep_scale);
    this->store_dk(dk_, static_cast<float>(p_.softmax_scale) * keep_scale);
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

  /// Computes dP; meanwhile() runs while the product does.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply_grads(Scores& s, Meanwhile meanwhile) const {
    wait_for(storage_.v_full, 0);
    this->wait_for_grad();
    Products::start(s, Base::keys_ + kValues, this->grad_tile());
    meanwhile();
    Products::finish(s);
  }

  /// Computes dV += P dO and dK += dS Q. Both products are issued before meanwhile() runs, and are complete on return.
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

  /// Where dS of this warpgroup's keys lies in shared memory.
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

  __device__ __forceinline__ void sanitise_rows() const {
    Base::sanitise_rows(warpgroup_ * kWarpgroupThreads + this->thread());
    ptx::barrier_sync<BackwardBarriers<Config>::kRowsSanitised, Base::kConsumerThreads>();
  }

 private:
  __device__ __forceinline__ void publish_ds() const {
    ptx::fence_proxy_async_shared();
    this->release(storage_.ds_full[at_.stage()]);
  }

  Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
