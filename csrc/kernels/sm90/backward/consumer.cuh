// The warpgroups that compute scores and their gradients, dK and dV: 64 keys each.
#pragma once

#include "consumer_keys.cuh"

namespace flash_ext::sm90 {

/// What one warp of them does.
template <class Config, class State = BackwardState<Config>>
class BackwardGroup : protected BackwardKeys<Config, State> {
 public:
  using Base = BackwardKeys<Config, State>;
  using typename Base::Element;
  using typename Base::Products;
  using typename Base::Scores;
  using typename Base::Sum;
  using typename Base::Tile;
  using typename Base::Weights;

  __device__ __forceinline__ BackwardGroup(const BackwardParams& p, State& state, uint32_t s_tiles, float scale,
                                           int group, int lane)
      : Base(p, state, s_tiles, group * panel_bytes(kGroupRows), scale, group, lane) {}

  __device__ __forceinline__ void run() {
    clear_sums();
    if (work_.tiles.begin < work_.tiles.end) {
      clean_keys();
#pragma unroll 1
      for (int head = 0, tile = work_.tiles.begin;;) {
        visit(tile);
        if (++tile < work_.tiles.end) continue;
        tile = work_.tiles.begin;
        if (++head == work_.heads) break;
      }
    }
    this->store_dv(dv_, 1.0f);
    this->store_dk(dk_, static_cast<float>(p_.softmax_scale));
  }

 protected:
  using Base::at_;
  using Base::group_;
  using Base::lane_;
  using Base::p_;
  using Base::s_tiles_;
  using Base::state_;
  using Base::warp_;
  using Base::work_;
  static constexpr uint32_t kValues = Config::kKeyBytes / 16;  // behind K, in a descriptor

  __device__ __forceinline__ void clear_sums() {
    Products::clear(dk_);
    Products::clear(dv_);
  }

  __device__ __forceinline__ void visit(int tile) {
    if (work_.is_cleaned(tile)) clean_rows();
    if (this->sees(tile)) {
      step(tile, this->hides(tile));
    } else {
      pass();
    }
    at_.advance();
  }

  /// A tile that other warpgroups see. Barriers are waited for all the same, lest one gets ahead by two phases.
  __device__ __forceinline__ void pass() const {
    this->wait_for_query();
    this->release_query();
    this->wait_for_grad();
    this->release_grad();
    wait_for_ds_room();
    this->clear_ds(s_ds());
    hand_ds_over();
  }

  /// A tile of which this warpgroup's keys see something; `hides`: but not all. Scores and their gradients take the
  /// same registers, one after the other.
  __device__ __forceinline__ void step(int tile, bool hides) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::multiply(s, Base::keys_, this->query_tile());
    this->weigh(s);
    if (hides) this->hide(s, tile);
    pack_operand<Element>(p, s);

    multiply_grads(s);
    this->differentiate(ds, s, p, hides);
    hand_over(ds);
    add_up(p, ds, [] {});
  }

  /// dP
  __device__ __forceinline__ void multiply_grads(Scores& s) const {
    wait_for(state_.v_full, 0);
    this->wait_for_grad();
    Products::multiply(s, Base::keys_ + kValues, this->grad_tile());
  }

  /// dV += P dO, dK += dS Q: under way together, beside meanwhile(), and over when this returns.
  template <class Meanwhile>
  __device__ __forceinline__ void add_up(const Weights& p, const Weights& ds, Meanwhile meanwhile) {
    Products::start_sum(dv_, p, this->grad_tile());
    Products::start_sum(dk_, ds, this->query_tile());
    meanwhile();
    ptx::wgmma_wait<1>();
    Products::pin(dv_);
    this->release_grad();
    ptx::wgmma_wait<0>();
    Products::pin(dk_);
    this->release_query();
  }

  /// Of this warpgroup's keys.
  __device__ __forceinline__ uint32_t s_ds() const {
    return s_tiles_ + Config::kDsOffset + at_.stage() * Config::kDsBytes + group_ * Config::kDsPanelBytes;
  }
  __device__ __forceinline__ void wait_for_ds_room() const { wait_for(state_.ds_empty[at_.stage()], at_.parity() ^ 1); }
  __device__ __forceinline__ void hand_over(const Weights& ds) const {
    wait_for_ds_room();
    Tile::store(Tile::row_of_lane(s_ds(), warp_, lane_), ds);
    hand_ds_over();
  }
  __device__ __forceinline__ void hand_ds_over() const {
    ptx::fence_proxy_async_shared();
    this->release(state_.ds_full[at_.stage()]);
  }

  /// K of this warpgroup. What a query does see, its lse knows, or it is a score of -inf still.
  __device__ __forceinline__ void clean_keys() const {
    wait_for(state_.k_full, 0);
#pragma unroll 1
    for (int panel = 0; panel < panels(Config::kHeadDim); ++panel)
      clean_tile<Element, panel_bytes(kGroupRows), kGroupThreads>(
          s_tiles_ + panel * panel_bytes(Config::kBlockN) + group_ * panel_bytes(kGroupRows), this->thread());
    ptx::barrier_any<kGroupThreads>(2 + group_, false);
  }
  __device__ __forceinline__ void clean_rows() const {
    Base::clean_rows(group_ * kGroupThreads + this->thread());
    ptx::barrier_sync<1, Base::kComputing>();
  }

  Sum dk_, dv_;
};

}  // namespace flash_ext::sm90
