// The traversal of the key tiles that masks leave, with a bias, masks and dropout.
//
// It differs from the plain one (traverse_range.cuh) in five points:
//   1. A list of the tiles that masks leave (visible_tiles.cuh) drives the loads. Metadata with each tile says which
//      warpgroups visit it.
//   2. Tiles that need only mask bits, and a bias or dropout but not both, take pipelined steps. Runs of such tiles
//      read the metadata once. Other tiles compute S, P and P V one after the other.
//   3. A bias alone and masks alone have kernels without tests for anything else.
//   4. A warp updates its row stabilisers as long as one of its rows has none, or one so low that it must come from a
//      bias that pads.
//   5. Row sums detect overflow: a tile whose sum passes kSumLimit moves the exponent of the sum into the stabiliser,
//      while P is still in float. Otherwise a bias that grows along the keys would make every query tile be computed
//      twice.
#pragma once

#include "option_scores.cuh"

namespace flash_ext::sm90 {

template <class Config>
class TraverseVisible : public ForwardOptionScores<Config> {
  using Base = ForwardOptionScores<Config>;

 protected:
  using Base::add_bias, Base::add_sums, Base::compute_kept, Base::drop, Base::fence_out, Base::has_bias,
      Base::hide_by_bias, Base::hide_something, Base::hide_weights, Base::k_at_, Base::kKeyParts, Base::kOnlyBias,
      Base::kOnlyMask, Base::kPreloadsBias, Base::kSingle, Base::load_bias, Base::load_bits, Base::load_bits_and_vote,
      Base::load_random_bits, Base::next_bias_arrived, Base::options_, Base::prepare_random_bits, Base::release,
      Base::release_bias, Base::release_values, Base::scale_first, Base::some_stabiliser_is_low, Base::stabiliser_,
      Base::start_pv, Base::start_qk, Base::storage_, Base::v_at_, Base::wait_for_random_bits, Base::wait_for_values,
      Base::warpgroup_;
  using typename Base::BiasPairs, typename Base::Element, typename Base::KeptWeights, typename Base::Scores,
      typename Base::SharedRandomBits, typename Base::VisibleBits, typename Base::Weights;
  static_assert(kKeyParts == 1, "S of 128 keys and P of the tile before do not fit into registers");
  template <bool kBias>
  static constexpr bool kHasStep = !kBias || kPreloadsBias;
  // Bits of mode_. kUpdatesRowMax: this warp updates its row stabilisers in the next tile. kWaits: P of the tile before
  // is computed, its P V is not. kPipelined: the next tiles may take pipelined steps. From bit kRun on: the number of
  // tiles of the current run that follow the current tile.
  static constexpr uint32_t kUpdatesRowMax = 1, kWaits = 2, kPipelined = 4, kRun = 8;

 public:
  using Base::Base;
  using typename Base::WorkTile;

 protected:
  __device__ __forceinline__ void visit(const WorkTile& work_tile) {
    this->wait_for_query(work_tile);
    mode_ = kUpdatesRowMax;
    if constexpr (Config::kDrops) prepare_random_bits(work_tile);
    if (has_bias()) {
      visit_tiles<true>(work_tile);
    } else {
      visit_tiles<false>(work_tile);
    }
  }

 private:
  /// There is one loop with a bias and one without: a common one would have to zero the bias registers in each tile.
  template <bool kBias>
  __device__ __forceinline__ void visit_tiles(const WorkTile& work_tile) {
    Weights p = {};  // initialised, else its registers stay live from one work tile to the next
    uint32_t flags;
#pragma unroll 1
    do {
      this->wait_for_keys();
      const TileMetadata metadata = storage_.k_metadata[k_at_.stage()];
      flags = metadata.flags;
      if (!kHasStep<kBias> || !(mode_ & kPipelined) || !metadata.is_full_for(warpgroup_)) {
        visit_alone<kBias>(p, work_tile, metadata);
      } else if constexpr (kHasStep<kBias>) {
        mode_ += metadata.run() * kRun;
        take_steps<kBias>(p);
      }
    } while (!(flags & TileMetadata::kLast));
    release_query(work_tile);
    if (mode_ & kWaits) add_values(p);
  }

  /// Adds P V of the tile before, and then computes S and P of this one, if the warpgroup visits it.
  template <bool kBias>
  __device__ __forceinline__ void visit_alone(Weights& p, const WorkTile& work_tile, const TileMetadata& metadata) {
    if (mode_ & kWaits) add_values(p);
    if (!metadata.visible(warpgroup_)) return skip_tile();
    mode_ = (mode_ & kUpdatesRowMax) | kWaits;
    softmax_tile<kBias>(p, work_tile, metadata);
    const bool may_pipeline = kHasStep<kBias> && (kSingle || !options_.scales_first) && !work_tile.safe_path;
    if (may_pipeline && !some_warp_updates_row_max()) mode_ |= kPipelined;
  }

  __device__ __forceinline__ void release_query(const WorkTile& work_tile) const {
    if (Config::kQuerySlots == 1 && work_tile.has_rows(warpgroup_)) release(storage_.q_empty[warpgroup_]);
  }

  /// A vote of the warpgroup: all four warps start its products, so they must take the same branch.
  __device__ __forceinline__ bool some_warp_updates_row_max() const {
    return ptx::barrier_any<kWarpgroupThreads>(barrier_of_warpgroup(warpgroup_), mode_ & kUpdatesRowMax);
  }

  __device__ __forceinline__ void release_keys() {
    release(storage_.k_empty[k_at_.stage()]);
    k_at_.advance();
  }

  __device__ __forceinline__ void skip_tile() {
    __syncwarp();  // all lanes have read the metadata
    mode_ &= kUpdatesRowMax;
    release_keys();
    wait_for_values();
    release_values();
  }

  /// Computes S and P of a tile with any options.
  template <bool kBias>
  __device__ __forceinline__ void softmax_tile(Weights& p, const WorkTile& work_tile, const TileMetadata& metadata) {
    Scores s;
    VisibleBits visible = {};
    BiasPairs bias;
    SharedRandomBits random_bits;
    if constexpr (Config::kDrops) load_random_bits(random_bits);
    start_qk(s);
    const bool hides = load_bits_and_vote(metadata, visible);
    if constexpr (kBias && kPreloadsBias) load_bias(bias);
    ptx::wgmma_wait<0>();
    ptx::fence_operand(s[0]);
    if constexpr (Config::kDrops) wait_for_random_bits(random_bits);
    release_keys();
    scale_first(s, work_tile, metadata, !kBias && !hides && this->is_full(work_tile, metadata.tile));
    if constexpr (kBias) {
      if (work_tile.safe_path) {
        add_bias<true>(s, bias);
      } else {
        add_bias<false>(s, bias);
      }
    }
    if (hides) hide_by_bits(s, visible);
    this->hide(s, work_tile, metadata.tile);
    float sum[2];
    if (mode_ & kUpdatesRowMax) {
      this->update_row_max(s);
      exponentiate<false, true>(s, this->scale_, stabiliser_, sum);
      if (!work_tile.safe_path && !some_stabiliser_is_low(work_tile)) mode_ ^= kUpdatesRowMax;
    } else {
      exponentiate<false>(s, this->scale_, stabiliser_, sum);
    }
    add_sums(s, sum, [&] {
      if constexpr (kBias) hide_by_bias(s);
    });
    if constexpr (kBias) release_bias();
    this->pack(p, s);
    if constexpr (Config::kDrops) {
      KeptWeights kept;
      compute_kept(kept, random_bits);
      drop(p, kept);
    }
  }

  /// What a step loads of its tile: the bias before it begins, mask bits before S is complete.
  template <bool kBias>
  struct StepInputs {
    BiasPairs bias;
    VisibleBits visible;
    bool hides;
    bool v_arrived = false;  // V of the tile before has arrived
  };

  /// Takes steps over a run of tiles that the window leaves whole and in which all rows have stabilisers. A step adds
  /// P V of the tile before and computes S and P of its own. Each load from shared memory and each test of a barrier
  /// takes some 100 cycles, because products of the other warpgroups keep shared memory busy. So a step issues them
  /// early: it loads the bias, and tests whether the next tile has arrived, one step ahead.
  template <bool kBias>
  __device__ __forceinline__ void take_steps(Weights& p) {
    StepInputs<kBias> inputs;
    if constexpr (kBias) load_bias(inputs.bias);
#pragma unroll 1
    while (true) {
      Scores s;
      SharedRandomBits random_bits;
      if constexpr (Config::kDrops) load_random_bits(random_bits);
      if constexpr (!kOnlyBias) load_bits(inputs.visible);
      const bool partly = !kOnlyBias && storage_.k_metadata[k_at_.stage()].is_masked(warpgroup_);
      start_qk(s);
      if (!inputs.v_arrived) wait_for_values();
      start_pv(p);
      inputs.hides = !kOnlyBias && __any_sync(~0u, partly && hide_something(inputs.visible));
      ptx::wgmma_wait<1>();
      ptx::fence_operand(s[0]);
      if constexpr (Config::kDrops) wait_for_random_bits(random_bits);
      release_keys();
      const bool goes_on = mode_ >= kRun;
      float sum[2];
      softmax_step(s, inputs, sum);
      ptx::wgmma_wait<0>();
      fence_out();
      release_values();
      bool bias_arrived = false;
      const bool k_arrived = ptx::mbarrier_test(address(storage_.k_full[k_at_.stage()]), k_at_.parity());
      inputs.v_arrived = ptx::mbarrier_test(address(storage_.v_full[v_at_.stage()]), v_at_.parity());
      if constexpr (kBias) bias_arrived = next_bias_arrived();
      KeptWeights kept;
      if constexpr (Config::kDrops) compute_kept(kept, random_bits);
      add_sums(s, sum, [&] {
        if constexpr (kBias) hide_by_bias(s);
        if constexpr (kOnlyMask)
          if (inputs.hides) hide_weights(s, inputs.visible);  // else there are no bits of this tile
      });
      if constexpr (kBias) {
        release_bias();
        if (goes_on) load_bias(inputs.bias, bias_arrived);
      }
      this->pack(p, s);
      if constexpr (Config::kDrops) drop(p, kept);
      if (!goes_on) break;
      mode_ -= kRun;
      if (!k_arrived) this->wait_for_keys();
    }
  }

  /// Turns products into weights and sums them. A single option goes into the addend of the exponential's FMA, together
  /// with the stabiliser; its instructions stand between exponentials, which leave three of four issue slots free.
  template <bool kBias>
  __device__ __forceinline__ void softmax_step(Scores& s, const StepInputs<kBias>& inputs, float (&sum)[2]) const {
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = stabiliser_[r] == -INFINITY ? 0.0f : -stabiliser_[r];
    if constexpr (kOnlyBias) {
      exponentiate_with(s, this->scale_, sum, [&](int n, int e) {
        const float2 b = ptx::unpack2<Element>(inputs.bias[n / 8][n % 8 * 2 + e / 2]);
        return fmaf(e % 2 == 0 ? b.x : b.y, kLog2E, shift[e / 2]);
      });
    } else if (kOnlyMask && inputs.hides) {
      exponentiate_with(s, this->scale_, sum, [&](int n, int e) {
        return QuadOrder::sees(inputs.visible[n / 8][e / 2], n % 8, e % 2) ? shift[e / 2] : -INFINITY;
      });
    } else {
      if constexpr (kBias) add_bias<false>(s, inputs.bias);
      if (inputs.hides) hide_by_bits(s, inputs.visible);
      exponentiate<false>(s, this->scale_, stabiliser_, sum);
    }
  }

  uint32_t mode_;  // kUpdatesRowMax and so on
};

}  // namespace flash_ext::sm90
