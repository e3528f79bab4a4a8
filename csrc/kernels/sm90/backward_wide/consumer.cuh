// The consumer warpgroups for head dims above 128, where dK or dV alone fills the registers of a warpgroup. For a CTA's
// 64 keys one warpgroup computes S, P and dV, the other dP, dS and dK.
#pragma once

#include <type_traits>

#include "option_scores.cuh"
#include "product_scores.cuh"

namespace flash_ext::sm90 {

template <class Config>
using BackwardWideScores =
    std::conditional_t<Config::kHasOptions, BackwardWideOptionScores<Config>, BackwardWideProductScores<Config>>;

/// A consumer warp of S, P and dV.
template <class Config>
class BackwardWideValues : BackwardWideScores<Config> {
 public:
  using Base = BackwardWideScores<Config>;
  using Base::Base;
  using typename Base::Element, typename Base::Storage, typename Base::Tile, typename Base::Weights;

  __device__ __forceinline__ void run() {
    zero_accumulators(sum_);
    sanitise_keys();  // waits for K, too: TMA must not outlive the CTA
    this->visit_heads([&](const auto& at) { step<true>(at); }, [&](const auto& at) { step<false>(at); });
    this->store_dv(sum_, Config::kHasOptions ? Base::workspace_.keep_scale : 1.0f);
  }

 private:
  using Base::at_, Base::storage_, Base::sum_;

  /// One step. Without kSees, the tile sees only keys of the other CTA. Releasing Q releases lse, too, so P is stored
  /// before.
  template <bool kSees, class At>
  __device__ __forceinline__ void step(const At& at) {
    Weights p, published;
    this->sanitise_queries(at, 0);
    this->wait_for_query();
    if constexpr (kSees) this->compute_p(p, published, at);
    wait_for_p_room();
    if constexpr (kSees) Tile::store(this->s_weights(), Config::kHasOptions ? published : p);
    this->release_query();
    this->publish_p();
    this->wait_for_grad();
    if constexpr (kSees) this->add_up(p, this->grad_tile());
    this->release_grad();
    at_.advance();
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

  __device__ __forceinline__ BackwardWideGradients(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                   Storage& storage, uint32_t s_tiles, int rank, int lane)
      : Base(p, workspace, storage, s_tiles, Config::kValuesOffset, 0.0f, rank, lane) {}

  __device__ __forceinline__ void run() {
    zero_accumulators(sum_);
    sanitise_keys();
    this->visit_heads([&](const auto& at) { step<true>(at); }, [&](const auto& at) { step<false>(at); });
    const float scale = static_cast<float>(Base::p_.softmax_scale);
    this->store_dk(sum_, Config::kHasOptions ? scale * Base::workspace_.keep_scale : scale);
  }

 private:
  using Base::at_, Base::storage_, Base::sum_;

  /// One step, as above. Releasing dO releases D, too, so dS is stored before. dS takes the registers and the place of
  /// P.
  template <bool kSees, class At>
  __device__ __forceinline__ void step(const At& at) {
    Scores dp;
    Weights weights;
    this->sanitise_queries(at, kWarpgroupThreads);
    this->wait_for_grad();
    if constexpr (kSees) Products::multiply(dp, Base::keys_, this->grad_tile());
    wait_for_p();
    if constexpr (kSees) {
      compute_ds(weights, dp, at);
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

  /// Computes dS from what was published of P, and stores it in its place.
  template <class At>
  __device__ __forceinline__ void compute_ds(Weights& ds, const Scores& dp, const At& at) const {
    const uint32_t s_weights = this->s_weights();
    if constexpr (Config::kHasOptions) {
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) compute_ds_of_part(ds, dp, s_weights, at, part);
    } else {
      Tile::load(ds, s_weights);
      Base::compute_ds(ds, dp, ds, this->hides(at));
      Tile::store(s_weights, ds);
    }
  }
  /// The same with options, for a part of the tile's queries.
  __device__ __forceinline__ void compute_ds_of_part(Weights& ds, const Scores& dp, uint32_t s_weights,
                                                     const BackwardWideStep& at, int part) const {
    using Part = BackwardWidePart<Config>;
    auto& weights = reinterpret_cast<typename Part::Weights&>(ds[part * Part::kSteps]);
    const auto& gradients = reinterpret_cast<const typename Part::Scores&>(dp[0][part * Part::kN]);
    const float* const s_minus_delta = storage_.minus_delta[at_.stage()] + part * Config::kQueriesOfPart;
    const uint32_t s_part = s_weights + part * panel_bytes(Config::kQueriesOfPart);
    Part::load(weights, s_part);
    if (Config::may_have(kStepDrops) && Base::p_.dropout.rule.threshold > 0) {
      Part::compute_ds_signed(weights, gradients, weights, s_minus_delta, Base::lane_);
    } else {
      constexpr bool kMayHide = Config::may_have(kStepBiased | kStepKeyBiased);
      const bool hides = kMayHide || at.is_masked || this->hides(at.tile);
      Part::compute_ds(weights, gradients, weights, s_minus_delta, Base::lane_, hides);
    }
    Part::store(s_part, weights);
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
