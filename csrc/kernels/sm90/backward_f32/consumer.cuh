// The consumer warpgroups of the float32 backward: one computes scores and dV, the other gradients of scores and dK.
#pragma once

#include "kernels/common/tile.cuh"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/reread.h"
#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/backward/score_tile.cuh"
#include "kernels/sm90/common/float_products.cuh"
#include "warp.cuh"

namespace flash_ext::sm90 {

/// Where P of a warp lies on its way to the warp that computes dS from it: in float, in the room that two parts of that
/// dS take later, so that no other warp's slots are touched.
struct WeightLayout {
  /// The address of accumulators n of a lane. Two lanes take a row's two 16-byte chunks, eight rows all banks
  /// twice.
  __device__ __forceinline__ static uint32_t of(uint32_t s_ds, int n, int warp, int lane) {
    const int at = n * 32 + lane, row = at / 2 % kSubtileRows;
    const uint32_t chunk = (2 * warp + at % 2) ^ (row % 8);
    return s_ds + at / (2 * kSubtileRows) * kPartBytes + row * kPanelRowBytes + chunk * 16;
  }
};

/// Where the other CTA's halves arrive: of S where P will lie, of dP in the third part of dS and after it. The halves
/// of a warp are contiguous, because stores to the other CTA travel by lines; so they lie in other warps' places of P
/// and dS.
struct HalfLayout {
  static constexpr int kOfGradients = 2 * kPartBytes;
  static constexpr int kWarpBytes = kWarpgroupRows * kSubtileRows * 4 / kWarpgroupWarps;

  /// The address of accumulators n of a lane.
  __device__ __forceinline__ static uint32_t of(uint32_t s_halves, int n, int warp, int lane) {
    return s_halves + warp * kWarpBytes + n * 512 + lane * 16;
  }
};

/// What the consumer warps of both warpgroups share. Those of dV multiply K by Q and then use dO; those of dK multiply
/// V by dO and then use Q.
template <class Config>
class BackwardF32Sums : public BackwardF32Warp<Config> {
 public:
  using Base = BackwardF32Warp<Config>;
  using Base::Base;
  using typename Base::Step;
  using Products = FloatProducts;
  static constexpr int kPanels = Config::kPanels;

 protected:
  using Base::at_, Base::lane_, Base::warp_, Base::work_tile_;

  __device__ __forceinline__ void zero_sums() {
    for (Products::Tile& sum : sum_.full_panels) zero_accumulators(sum);
    if constexpr (Config::kHasHalf) zero_accumulators(sum_.half);
  }

  /// Computes x = A B^T; wait(i) waits for subtile i of B. Up to head_dim 128 x has the bits of the forward's Q K^T,
  /// from which lse was computed. Beyond, a CTA's columns are two sums, because tensor cores round every sum towards
  /// zero.
  template <class Wait, class SubtileOfA, class SubtileOfB>
  __device__ __forceinline__ static void multiply(Products::Tile& x, Wait wait, SubtileOfA a, SubtileOfB b) {
    Products::Tile rest, second;
    wait(0);
    Products::start<true, true>(x, rest, a(0), b(0));
    if constexpr (kPanels == 2) {
      wait(1);
      if constexpr (Config::kCluster > 1) {
        Products::start<true, true, Config::kLastColumns, false>(second, rest, a(1), b(1));
      } else {
        Products::start<false, true>(x, rest, a(1), b(1));
      }
    }
    ptx::wgmma_wait<0>();
    ptx::fence_operand(x);
    ptx::fence_operand(rest);
    if constexpr (Config::kCluster > 1) {
      ptx::fence_operand(second);
      Products::add(x, second);
    }
    Products::add(x, rest);
  }

  /// Adds the other CTA's x, which is over its columns. Both CTAs add the same two numbers and so have the same sum.
  __device__ __forceinline__ void add_other_half(Products::Tile& x, int halves,
                                                 const uint64_t (&half_full)[kWarpgroupWarps]) const {
    const int lane = ptx::reread(lane_);
    const uint32_t s_halves = this->s_ds() + halves, other_halves = this->in_other(s_halves);
    const uint32_t s_full = address(half_full[warp_]), other_full = this->in_other(s_full);
    if (lane == 0) ptx::mbarrier_arrive_expect(s_full, HalfLayout::kWarpBytes);
    wait_for(this->storage_.other_empty, at_.parity() ^ 1);
#pragma unroll
    for (int n = 0; n < Products::kEights; ++n)
      ptx::cluster_store(HalfLayout::of(other_halves, n, warp_, lane), x[n], other_full);
    ptx::mbarrier_wait(s_full, at_.parity());
#pragma unroll
    for (int n = 0; n < Products::kEights; ++n) {
      const float4 other = load_shared<float4>(HalfLayout::of(s_halves, n, warp_, lane));
      x[n][0] += other.x, x[n][1] += other.y, x[n][2] += other.z, x[n][3] += other.w;
    }
  }

  /// Waits until all warps have read their halves, which may then be overwritten.
  template <BackwardF32Barrier kBarrier>
  __device__ __forceinline__ static void wait_for_halves() {
    if constexpr (Config::kCluster > 1) ptx::barrier_sync<kBarrier, kWarpgroupThreads>();
  }

  /// Adds A B to the sums. This warpgroup is the last to read the slots of B and fills them again: `load` loads a
  /// subtile of a step.
  template <class Wait, class SubtileOfB, class Load>
  __device__ __forceinline__ void add_up(const Products::Operand& a, const Step& step, Wait wait, SubtileOfB b,
                                         const uint64_t* empty, Load load) {
    const auto add_panel = [&](auto& total, int panel) {
      std::remove_reference_t<decltype(total)> sum;
      wait(panel);
      Products::start(sum, a, b(panel));
      ptx::wgmma_wait<0>();
      ptx::fence_operand(sum);
      const uint64_t& slot_empty = empty[at_.slot(panel)];
      this->release(slot_empty);
      if (warp_ == 0) fill_again(step, panel, slot_empty, load);
      Products::add(total, sum);
    };
#pragma unroll
    for (int panel = 0; panel < Config::kFullPanels; ++panel) add_panel(sum_.full_panels[panel], panel);
    if constexpr (Config::kHasHalf) add_panel(sum_.half, Config::kFullPanels);
  }

  typename Base::Sums sum_;

 private:
  template <class Load>
  __device__ __forceinline__ void fill_again(const Step& step, int panel, const uint64_t& slot_empty, Load load) const {
    const Step after = this->step_after(step);
    if (lane_ == 0 && after.head < work_tile_.heads) {
      wait_for(slot_empty, at_.parity());
      load(after, panel);
    }
    __syncwarp();
  }
};

/// A consumer warp of S, P and dV.
template <class Config>
class BackwardF32Values : BackwardF32Sums<Config> {
 public:
  using Base = BackwardF32Sums<Config>;
  using Base::Base;
  using typename Base::Step;
  using Products = FloatProducts;
  using Scores = float[1][8][4];
  static constexpr int kPanels = Config::kPanels;
  using Tile = BackwardTile<__nv_bfloat16, Config::kBlockM>;

  __device__ __forceinline__ void run() {
    this->zero_sums();
    this->for_each_step([&](const Step& step) { visit(step); });
    this->store_dv(sum_, 1.0f);
  }

 private:
  using Base::at_, Base::lane_, Base::p_, Base::storage_, Base::sum_, Base::warp_, Base::work_tile_;

  __device__ __forceinline__ void visit(const Step& step) {
    Products::Operand p;
    {
      Scores s;
      multiply(s[0]);
      softmax_step(s, step);
      Products::pack(p, s[0]);
    }
    add_up(p, step);
  }

  /// Computes S.
  __device__ __forceinline__ void multiply(Products::Tile& s) const {
    Base::multiply(
        s, [&](int panel) { this->wait_for_query(panel); }, [&](int panel) { return this->key_subtile(panel); },
        [&](int panel) { return this->query_subtile(panel); });
    if constexpr (Config::kCluster > 1) this->add_other_half(s, 0, storage_.s_half_full);
  }

  /// Replaces S by P. Publishes P times the derivative of the softcap.
  __device__ __forceinline__ void softmax_step(Scores& s, const Step& step) const {
    const float* const s_lse = storage_.lse[at_.tile()];
    if constexpr (Config::kScoreOptions) {
      softmax_step_with_options(s, step, s_lse);
    } else {
      Tile::template softmax_step<ScoreUnit<float>>(s, s_lse, static_cast<float>(p_.softmax_scale), lane_);
      hide(s, step);
      publish(s);
    }
  }

  __device__ __forceinline__ void softmax_step_with_options(Scores& s, const Step& step, const float* s_lse) const {
    Sequence sequence = work_tile_.sequence;
    sequence.head += step.head;
    const ScoreRules<float> rules(p_, sequence);
    rules.scale_and_cap(s);
    Scores weights;
    for_each_score(s, [&](float& x, int, int n, int e) { weights[0][n][e] = x; });
    rules.add_alibi(weights, TileCoordinates<true>::of_lane(first_key(), step.tile * Config::kBlockM, lane_));
    Tile::template softmax_step<ScoreUnit<float>>(weights, s_lse, 1.0f, lane_);
    hide(weights, step);
    const float cap = rules.cap, inverse = cap > 0.0f ? 1.0f / cap : 0.0f;
    for_each_score(s, [&](float& x, int, int n, int e) {
      const float t = x * inverse, weight = weights[0][n][e];
      x = weight == 0.0f ? 0.0f : weight * softcap_slope(t);
    });
    publish(s);
    for_each_score(s, [&](float& x, int, int n, int e) { x = weights[0][n][e]; });
  }

  __device__ __forceinline__ int first_key() const { return work_tile_.first_key + warp_ * 16; }

  __device__ __forceinline__ void hide(Scores& s, const Step& step) const {
    const TileSpan& seen = work_tile_.groups[0];
    if (step.tile >= seen.full_begin && step.tile < seen.full_end) return;
    Tile::hide(s, work_tile_.sequence, first_key(), step.tile * Config::kBlockM, lane_);
  }

  __device__ __forceinline__ void publish(const Scores& s) const {
    wait_for(storage_.ds_empty[at_.tile()], at_.parity() ^ 1);
    this->template wait_for_halves<kValuesBarrier>();
    const int lane = ptx::reread(lane_);
#pragma unroll
    for (int n = 0; n < 8; ++n)
      store_shared(WeightLayout::of(this->s_ds(), n, warp_, lane),
                   float4{s[0][n][0], s[0][n][1], s[0][n][2], s[0][n][3]});
    this->release(storage_.p_full[at_.tile()]);
  }

  /// dV += P dO
  __device__ __forceinline__ void add_up(const Products::Operand& p, const Step& step) {
    Base::add_up(
        p, step, [&](int panel) { this->wait_for_grad(panel); }, [&](int panel) { return this->grad_subtile(panel); },
        storage_.do_empty, [&](const Step& after, int panel) { this->load_grad(after, panel); });
  }
};

/// A consumer warp of dP, dS and dK.
template <class Config>
class BackwardF32Gradients : BackwardF32Sums<Config> {
 public:
  using Base = BackwardF32Sums<Config>;
  using Base::Base;
  using typename Base::Step;
  using Products = FloatProducts;
  static constexpr int kPanels = Config::kPanels;
  using Tile = BackwardTile<__nv_bfloat16, Config::kBlockM>;

  __device__ __forceinline__ void run() {
    this->zero_sums();
    this->for_each_step([&](const Step& step) { visit(step); });
    this->store_dk(sum_, static_cast<float>(p_.softmax_scale));
  }

 private:
  using Base::at_, Base::lane_, Base::p_, Base::storage_, Base::sum_, Base::warp_, Base::work_tile_;

  __device__ __forceinline__ void visit(const Step& step) {
    Products::Operand ds;
    {
      Products::Tile x;
      multiply(x);
      compute_ds(x);
      Products::pack(ds, x);
    }
    publish(ds);
    add_up(ds, step);
  }

  /// Computes dP.
  __device__ __forceinline__ void multiply(Products::Tile& dp) const {
    Base::multiply(
        dp, [&](int panel) { this->wait_for_grad(panel); }, [&](int panel) { return this->value_subtile(panel); },
        [&](int panel) { return this->grad_subtile(panel); });
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) this->release(storage_.do_empty[at_.slot(panel)]);
    if constexpr (Config::kCluster > 1) this->add_other_half(dp, HalfLayout::kOfGradients, storage_.dp_half_full);
  }

  /// Replaces dP by dS. Where the weight is 0, dS becomes 0: dP may be NaN there, from keys that the query does not
  /// see.
  __device__ __forceinline__ void compute_ds(Products::Tile& x) const {
    const int lane = ptx::reread(lane_);
    this->wait_for_query(0);
    wait_for(storage_.p_full[at_.tile()], at_.parity());
    const float* const s_terms = storage_.minus_delta[at_.tile()] + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float4 weight = load_shared<float4>(WeightLayout::of(this->s_ds(), n, warp_, lane));
      const float2 term = *reinterpret_cast<const float2*>(s_terms + 8 * n);
      const auto gradient = [](float weight, float dp) { return weight == 0.0f ? 0.0f : weight * dp; };
      x[n][0] = gradient(weight.x, x[n][0] + term.x);
      x[n][1] = gradient(weight.y, x[n][1] + term.y);
      x[n][2] = gradient(weight.z, x[n][2] + term.x);
      x[n][3] = gradient(weight.w, x[n][3] + term.y);
    }
  }

  /// Stores dS over the weights of this warp, which all its lanes have read.
  __device__ __forceinline__ void publish(const Products::Operand& ds) const {
    const uint32_t s_row = Tile::row_of_lane(this->s_ds(), warp_, lane_);
    ptx::wait_for_fragments(ds[0]);
    this->template wait_for_halves<kGradientsBarrier>();
#pragma unroll
    for (int part = 0; part < kFloatParts; ++part) Tile::store(s_row + part * kPartBytes, ds[part]);
    ptx::fence_proxy_async_shared();
    this->release(storage_.ds_full[at_.tile()]);
  }

  /// dK += dS Q. The warpgroup that published P has read Q and lse by then.
  __device__ __forceinline__ void add_up(const Products::Operand& ds, const Step& step) {
    Base::add_up(
        ds, step, [&](int panel) { this->wait_for_query(panel); },
        [&](int panel) { return this->query_subtile(panel); }, storage_.q_empty,
        [&](const Step& after, int panel) { this->load_query(after, panel); });
  }
};

}  // namespace flash_ext::sm90
