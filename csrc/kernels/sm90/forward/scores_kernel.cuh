// The forward with options of scores: softcap, ALiBi, scales of any sign. And which class serves a call.
//
// It differs from the plain class (kernel.cuh) in what a score goes through, and in the order of the tiles. ALiBi
// makes scores rise on the way to the diagonal, from either side: tiles are visited from there on, so that references
// need not rise behind it. Runs of tiles without a maximum have a loop of their own, which asks shared memory for
// nothing but the barriers: what a step waits for before its products, no other work hides.
#pragma once

#include "kernel.cuh"

namespace flash_ext::sm90 {

template <class Config>
class ForwardScoresGroup : public ForwardGroup<Config> {
  using Base = ForwardGroup<Config>;
  using Base::group_;
  using Base::p_;
  using Base::reference_;
  using Base::row_sum_;
  using typename Base::Scores;
  using typename Base::Weights;
  using typename Base::Work;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    WorkQueue<ForwardState<Config>> queue(this->state_);
    while (Work* const work = queue.front()) {
      this->clear();
      near_zero_ = Config::kCapsNearZero && this->terms_.near_zero.shift < 0.0f && work->slope == 0.0f;
      visit(*work);
      if (!work->careful) this->look_for_failure(*work);
      this->store(*work);
      if (work->met_non_finite) add_hidden_non_finite(*work);
      queue.pop(this->lane_);
    }
  }

 private:
  /// From the first tile down, and then from the end down to it.
  __device__ __forceinline__ void visit(const Work& work) {
    const TileSpan& rows = work.rows[group_];
    this->wait_for_query(work);
    int tile = work.first_tile(), last = work.tiles.begin;
#pragma unroll 1
    while (true) {
      for (; tile >= max(rows.end, last); --tile) this->pass();
      const int stop = max(rows.begin, last);
      if (tile >= stop) {
        Weights p;
        this->template weigh_keys<Raise::kMore>(work, tile, p);
        --tile;
        if (Config::kCapsNearZero && near_zero_ && tile >= stop) near_zero_ = references_are_near_zero();
#pragma unroll 1
        while (tile >= stop) {
          const int settled = work.settled_from(group_, tile, stop);
          if (settled <= tile) {
            tile = Config::kCapsNearZero && near_zero_ ? steps_near_zero(work, tile, settled, p)
                                                       : settled_steps(work, tile, settled, p);
          } else {
            this->template step<Raise::kMore>(work, tile, p);
            --tile;
          }
        }
        this->add_values(p);
      }
      for (; tile >= last; --tile) this->pass();
      if (last > work.first_tile()) break;
      tile = work.tiles.end - 1, last = work.first_tile() + 1;
    }
  }

  /// S is there, and P V of the tile before under way.
  __device__ __forceinline__ void start_settled_step(Scores& s, Weights& p) {
    this->wait_for_keys();
    this->start_qk(s);
    this->wait_for_values();
    this->start_pv(p);
    ptx::wgmma_wait<1>();
    this->pin(s);
  }

  /// Of the tiles from `tile` down to `last`, which raise no references. Returns the one behind.
  __device__ __forceinline__ int settled_steps(const Work& work, int tile, int last, Weights& p) {
    const auto rules = this->rules(work);
    const TileCoordinates<false> at = this->coordinates(work, tile);
    AlibiLine line = {tile > work.first_tile() ? -rules.slope : rules.slope,
                      at.column(0, 0) - at.row(0, 0) - rules.diagonal};
#pragma unroll 1
    for (; tile >= last; --tile, line.distance -= Config::kBlockN) {
      Scores s;
      start_settled_step(s, p);
      this->release_keys(work, tile);
      float sum[2];
      exponentiate_beside_diagonal<Config::kCapsByProducts>(s, rules, this->terms_.softcap, line, reference_, sum);
      row_sum_[0] += sum[0];
      row_sum_[1] += sum[1];
      ptx::wgmma_wait<0>();
      this->pin_out();
      this->release_values();
      this->pack(p, s);
    }
    return tile;
  }

  /// Those of the warpgroup: what the tiles so far say of the others.
  __device__ __forceinline__ bool references_are_near_zero() const {
    const float largest = static_cast<float>(SoftcapNearZero::kRange) * this->terms_.cap;
    return all_of_group(!(reference_[0] > largest || reference_[1] > largest));
  }

  __device__ __forceinline__ bool all_of_group(bool predicate) const {
    const bool all = !ptx::barrier_any<kGroupThreads>(1 + group_, !predicate);
    return __all_sync(~0u, all);  // tells the compiler that warps do not part here
  }

  /// The same with softcap alone, as long as all scores of the warpgroup stay near 0; what they are is not asked before
  /// the exponentials, but beside them. A tile with others is computed again, and the rest of the work is
  /// settled_steps()'. Rows behind the end of a sequence are asked too, as no predicate tells them: they are 0.
  __device__ __forceinline__ int steps_near_zero(const Work& work, int tile, int last, Weights& p) {
    const auto rules = this->rules(work);
#pragma unroll 1
    for (; tile >= last; --tile) {
      Scores s;
      start_settled_step(s, p);
      float sum[2];
      const bool serves = exponentiate_near_zero(s, this->terms_.near_zero, reference_, sum);
      near_zero_ = all_of_group(serves);
      ptx::wgmma_wait<0>();
      this->pin_out();
      this->release_values();
      if (!near_zero_) {
        this->start_qk(s);
        ptx::wgmma_wait<0>();
        this->pin(s);
        exponentiate_by_rules<Cap::kTanh, false>(s, rules, this->terms_.softcap, {}, reference_, sum);
        last = tile;
      }
      this->release_keys(work, tile);
      row_sum_[0] += sum[0];
      row_sum_[1] += sum[1];
      this->pack(p, s);
    }
    return tile;
  }

  /// There are no masks, and what follows from them would take registers in the loops.
  __device__ __forceinline__ void add_hidden_non_finite(const Work& work) const {
    AttentionParams without_masks;
    without_masks.head_dim_v = p_.head_dim_v;
    Base::add_hidden_non_finite(work, without_masks);
  }

  bool near_zero_;  // all scores of this work so far, as far as is known; and softcap alone goes before them
};

template <class Element, int kHeadDim, int kHeadDimV = kHeadDim>
void run_forward(const ForwardParams& p, [[maybe_unused]] int64_t block_n, void* workspace, cudaStream_t stream) {
  if (has_score_options(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale))
    return launch_forward<ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardClass::kOptions>>(p, workspace, stream);
  using Plain = ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardClass::kPlain>;
  if constexpr (has_two_shapes({kHeadDim, kHeadDimV})) {
    using ForFewKeys = ForwardConfig<Element, kHeadDim, kHeadDimV, ForwardClass::kPlain, ForwardKeys::kFew>;
    if (block_n == ForFewKeys::kBlockN) return launch_forward<ForFewKeys>(p, workspace, stream);
  }
  launch_forward<Plain>(p, workspace, stream);
}

}  // namespace flash_ext::sm90
