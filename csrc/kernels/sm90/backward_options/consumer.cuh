// The consumer warpgroups of the backward with options, in the loop without overlap. An option is a pass over the
// accumulators of a score tile. The kernel that takes any combination has one branch per pass, for the whole tile.
#pragma once

#include <cfloat>

#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/pair_masks.h"
#include "key_gradients.cuh"

namespace flash_ext::sm90 {

/// The state and the steps of one warp.
template <class Config>
class BackwardOptionsConsumer : BackwardKeyGradients<Config> {
 public:
  using Base = BackwardKeyGradients<Config>;
  using typename Base::Element, typename Base::Products, typename Base::Scores, typename Base::Storage,
      typename Base::Tile, typename Base::Weights;
  // Whether dS is computed from P times the derivative of the softcap. Where there may be dropout, the derivative is
  // multiplied in last.
  static constexpr bool kSlopesFirst = !Config::kAny && Config::may_have(kStepSoftcapped);
  static constexpr int kBlockM = Config::kBlockM, kN = Tile::kN, kSteps = Tile::kSteps;

  __device__ __forceinline__ BackwardOptionsConsumer(const BackwardParams& p, const BackwardOptionsLayout& layout,
                                                     Storage& storage, uint32_t s_tiles, int group, int lane)
      : Base(p, storage, s_tiles, group, lane), layout_(layout) {
    if (Config::may_have(kStepDrops) && p.dropout.rng) seeds_ = uniform_seeds(p.dropout);
  }

  /// Runs all steps, and stores dK and dV. `keep_scale`: as in the workspace.
  __device__ __forceinline__ void run(float keep_scale) {
    this->zero_sums();
    StepMetadata metadata = read_metadata(at_);
    if (!(metadata.flags & kStepPast)) {
      this->sanitise_keys();
      if (Config::template has<kStepKeyBiased>(metadata.flags)) load_key_bias(metadata.head);
      if (Config::template has<kStepDrops>(metadata.flags)) compute_kept(metadata, at_);
#pragma unroll 1
      do {
        metadata = visit(metadata);
        at_.advance();
      } while (!(metadata.flags & kStepPast));
    }
    this->store_sums(keep_scale);
  }

 private:
  using Base::at_, Base::lane_, Base::p_, Base::storage_, Base::warp_, Base::warpgroup_, Base::work_tile_;

  __device__ __forceinline__ const BackwardOptions& options() const { return storage_.options; }
  __device__ __forceinline__ uint32_t after_storage(int offset) const {
    return ptx::shared_address(&storage_) + offset;
  }

  using At = RingCount<Config::kStages>;

  __device__ __forceinline__ StepMetadata read_metadata(At at) const {
    wait_for(storage_.metadata_full[at.stage()], at.parity());
    return storage_.step_metadata[at.stage()];
  }

  /// Computes a step and returns the metadata of the next one. These are read, and kept weights are computed, while the
  /// last products of the step run.
  __device__ __forceinline__ StepMetadata visit(const StepMetadata& metadata) {
    StepMetadata after;
    const auto look_ahead = [&] {
      At next = at_;
      next.advance();
      after = read_metadata(next);
      if (Config::template has<kStepKeyBiased>(after.flags) && after.head != metadata.head &&
          !(after.flags & kStepPast))
        load_key_bias(after.head);
      if (!(after.flags & kStepPast) && Config::template has<kStepDrops>(after.flags)) compute_kept(after, next);
    };
    if (metadata.flags & kStepSanitised) this->sanitise_rows();
    if (this->sees(metadata.tile)) {
      step(metadata, this->hides(metadata.tile), look_ahead);
    } else {
      if (Config::template has<kStepBiased>(metadata.flags)) wait_for_bias();
      this->skip_tile();
      look_ahead();
    }
    return after;
  }

  /// Computes a step. `hides`: the window hides some pair of the tile. S and dP take the same registers, one after the
  /// other.
  template <class LookAhead>
  __device__ __forceinline__ void step(const StepMetadata& metadata, bool hides, LookAhead look_ahead) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::start(s, Base::keys_, this->query_tile());
    Products::finish(s);
    if constexpr (kSlopesFirst) {
      softmax_step_softcap(p, ds, s);
      if (hides) {
        this->hide(p, metadata.tile);
        this->hide(ds, metadata.tile);
      }
    } else {
      softmax_step(s, metadata);
      if (hides) this->hide_weights(s, metadata.tile);
      pack_operand<Element>(p, s);
    }
    const bool may_hide =
        Config::template has<kStepMasked>(metadata.flags) || Config::template has<kStepBiased>(metadata.flags);
    hide_by_options(p, metadata, hides);
    uint2 kept[kSteps];
    this->multiply_grads(s, [&] {
      if (!Config::kAny && Config::template has<kStepDrops>(metadata.flags)) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) kept[k] = load_kept(k);
      }
    });
    if constexpr (kSlopesFirst) {
      this->compute_ds(ds, s, ds, hides);
    } else if (Config::template has<kStepDrops>(metadata.flags)) {
      Tile::template compute_ds_kept<Config::kAny>(
          ds, s, p, storage_.minus_delta[at_.stage()], lane_, [&](int n, int r, uint32_t pair) {
            if (Config::kAny && n % 2 == 0 && r == 0) kept[n / 2] = load_kept(n / 2);  // no registers for it earlier
            return keep_pair(pair, kept[n / 2].x, kept[n / 2].y, n % 2 * 2 + r);
          });
      if (!Config::kAny && hides) this->hide(ds, metadata.tile);
    } else {
      this->compute_ds(ds, s, p, hides || (Config::kAny && may_hide));
    }
    if (!kSlopesFirst && Config::template has<kStepSoftcapped>(metadata.flags))
      multiply_by_slopes(ds, hides || (Config::kAny && may_hide));
    if (!Config::kAny && may_hide && !hides && Tile::holds_nan(ds)) zero_hidden(ds, p);
    if (Config::template has<kStepKeyBiased>(metadata.flags) && __any_sync(~0u, hides_keys())) zero_hidden_keys(p, ds);
    this->publish(ds);
    this->add_up(p, ds, look_ahead);
  }

  /// Zeroes weights that bias and masks hide. For a bias, a kernel without tests looks for NaN in dS instead, where the
  /// window hides nothing.
  __device__ __forceinline__ void hide_by_options(Weights& weights, const StepMetadata& metadata, bool hides) const {
    if ((Config::kAny || hides) && Config::template has<kStepBiased>(metadata.flags) && bias_by_pairs())
      hide_by_bias(weights);
    if (Config::template has<kStepMasked>(metadata.flags)) hide_by_words(weights);
  }

  /// Replaces products by weights. What a single option does to scores is one pass with their exponentials.
  __device__ __forceinline__ void softmax_step(Scores& s, const StepMetadata& metadata) const {
    float scale = options().scale;
    if (Config::template has<kStepSoftcapped>(metadata.flags)) {
      cap(s, scale);
      scale = options().cap;
    }
    const float* const lse = storage_.lse[at_.stage()];
    const AlibiOfLane<true> alibi = alibi_of(metadata);
    const bool is_sloped = Config::template has<kStepAlibi>(metadata.flags);
    if (bias_by_pairs()) {
      const auto sloped = [&](float x, int n, int e) { return alibi.add(x, 0, n, e); };
      const auto level = [](float x, int, int) { return x; };
      is_sloped ? softmax_step_bias(s, scale, sloped) : softmax_step_bias(s, scale, level);
    } else if (Config::template has<kStepBiased>(metadata.flags)) {
      // A sum that overflowed must not make NaN of a hidden pair. If a query does see the pair, its lse is not finite.
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int n, int e) {
        x = alibi.add(fminf(x * scale, FLT_MAX) - term, 0, n, e);
      });
      add_bias_32(s);
      for_each_score(s, [](float& x, int, int, int) { x = ptx::exp2_approx(x); });
    } else if (is_sloped) {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int n, int e) {
        x = ptx::exp2_approx(alibi.add(fmaf(x, scale, rest_of(term, e)), 0, n, e));
      });
    } else if (Config::may_have(kStepKeyBiased)) {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int, int e) {
        x = ptx::exp2_approx(fmaf(x, scale, rest_of(term, e)));
      });
    } else {
      Tile::softmax_step(s, lse, scale, lane_);
    }
  }

  /// For a softcap alone: computes P, and P times the derivative of the softcap.
  __device__ __forceinline__ void softmax_step_softcap(Weights& p, Weights& sloped, Scores& s) const {
    const float scale = options().scale, cap = options().cap;
    for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(x * scale); });
    const float* const s_lane = storage_.lse[at_.stage()] + 2 * (ptx::reread(lane_) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 tanh = {s[0][n][2 * r], s[0][n][2 * r + 1]};
        Tile::softcap_pair(p[n / 2][n % 2 * 2 + r], sloped[n / 2][n % 2 * 2 + r], tanh, term, cap);
      }
    }
  }
  /// What is added to a scaled score before ALiBi.
  __device__ __forceinline__ float rest_of(float term, int e) const {
    return Config::may_have(kStepKeyBiased) ? key_bias_[e / 2] - term : -term;
  }

  /// Replaces products by capped scores over the cap. The derivatives wait in the room of dS.
  __device__ __forceinline__ void cap(Scores& s, float scale) const {
    for_each_score(s, [&](float& x, int, int, int) { x = softcap_tanh<Element>(x * scale); });
    this->wait_for_ds_room();
    const uint32_t s_row = row_of_lane(this->s_ds());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t slopes[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const t = &s[0][2 * k + e / 2][e % 2 * 2];
        slopes[e] = ptx::pack2<Element>(softcap_slope(t[0]), softcap_slope(t[1]));
      }
      Tile::store(s_row, k, slopes);
    }
    __syncwarp();
  }

  /// Multiplies dS by the derivatives of the softcap. A NaN among them, of a sum that overflowed, must not reach hidden
  /// pairs.
  __device__ __forceinline__ void multiply_by_slopes(Weights& ds, bool hides) const {
    const uint32_t s_row = row_of_lane(this->s_ds());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t slopes[4];
      Tile::load(slopes, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t product = multiply_pairs<Element>(ds[k][e], slopes[e]);
        ds[k][e] = hides ? product & ptx::differs<Element>(ds[k][e], 0) : product;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t row_of_lane(uint32_t s_panel) const {
    return Tile::row_of_lane(s_panel, warp_, lane_);
  }

  __device__ __forceinline__ AlibiOfLane<true> alibi_of(const StepMetadata& metadata) const {
    const int lane = ptx::reread(lane_);
    const int first_query = metadata.tile * kBlockM + 2 * (lane % 4), first_key = this->first_key() + lane / 4;
    return {metadata.slope, static_cast<float>(first_query + work_tile_.sequence.offset - first_key)};
  }

  __device__ __forceinline__ uint32_t bias_slot() const { return layout_.bias_slots > 1 ? at_.stage() : 0; }
  __device__ __forceinline__ void wait_for_bias() const {
    const uint32_t parity = layout_.bias_slots > 1 ? at_.parity() : at_.count % 2;
    wait_for(storage_.bias_full[bias_slot()], parity);
  }
  /// The bias of this warpgroup's keys in shared memory.
  __device__ __forceinline__ uint32_t s_bias() const {
    return after_storage(layout_.bias + bias_slot() * layout_.bias_bytes +
                         warpgroup_ * (layout_.bias_bytes / Config::kWarpgroups));
  }
  /// Whether there is a bias of pairs in 16 bits. The kernels of certain options serve it in the inputs' dtype alone.
  __device__ __forceinline__ bool bias_by_pairs() const {
    return Config::kAny ? layout_.bias_by_pairs : Config::may_have(kStepBiased);
  }
  __device__ __forceinline__ bool bias_is_half() const {
    return Config::kAny ? p_.bias.dtype == DType::kFloat16 : std::is_same_v<Element, __half>;
  }
  template <class Added>
  __device__ __forceinline__ void softmax_step_bias(Scores& s, float scale, Added added) const {
    bias_is_half() ? softmax_step_bias<__half>(s, scale, added) : softmax_step_bias<__nv_bfloat16>(s, scale, added);
  }
  template <class T, class Added>
  __device__ __forceinline__ void softmax_step_bias(Scores& s, float scale, Added added) const {
    Weights bias;
    wait_for_bias();
    Tile::load(bias, row_of_lane(s_bias()));
    Tile::for_each_with_term(s, storage_.lse[at_.stage()], lane_, [&](float& x, float term, int n, int e) {
      const float2 pair = ptx::unpack2<T>(bias[n / 2][n % 2 * 2 + e / 2]);
      const float rest = fmaf(e % 2 ? pair.y : pair.x, kLog2E, -term);
      x = ptx::exp2_approx(added(fmaf(x, scale, rest), n, e));
    });
  }
  __device__ __forceinline__ void hide_by_bias(Weights& p) const {
    const uint32_t s_row = row_of_lane(s_bias());
    bias_is_half() ? Tile::template hide_by_bias<__half>(p, s_row)
                   : Tile::template hide_by_bias<__nv_bfloat16>(p, s_row);
  }
  __device__ __forceinline__ void add_bias_32(Scores& s) const {
    wait_for_bias();
    BiasRowsInShared<float, BaseTwoUnit, kWarpgroupRows>::add(s, s_bias(), 0, 16 * warp_, ptx::reread(lane_));
  }

  /// Zeroes weights that mask words hide.
  __device__ __forceinline__ void hide_by_words(Weights& p) const {
    const uint32_t s_words = after_storage(layout_.words + at_.stage() * layout_.words_bytes);
    Tile::hide_by_words(p, s_words + 4 * (2 * warpgroup_ + warp_ / 2) * kBlockM, warp_, lane_);
  }

  /// Zeroes dS where the weight is 0: dP may be NaN there, and so may P be where a bias hides.
  __device__ __forceinline__ void zero_hidden(Weights& ds, Weights& p) const {
    if (bias_by_pairs()) hide_by_bias(p);
    Tile::hide_weightless(ds, p);
  }

  /// Reads the per-key bias and mask of a head, for this lane's keys, to base 2.
  __device__ __forceinline__ void load_key_bias(int head) {
    Sequence sequence = work_tile_.sequence;
    sequence.head += head;
    // Indices are clamped, as keys past the last one have no weights. Branches of single lanes would take values that
    // are the same in all lanes out of uniform registers.
    const auto for_each_key = [&](auto f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) f(key_bias_[r], min(this->first_key() + lane_ / 4 + 8 * r, sequence.seqlen_k - 1));
    };
    key_bias_[0] = key_bias_[1] = 0.0f;
    if (layout_.bias_of_keys) {
      const BiasRows bias(p_.bias, sequence);
      bias.with_type([&](auto type) {
        for_each_key([&](float& x, int j) { x = bias.template load<decltype(type)>(0, j) * kLog2E; });
      });
    }
    if (layout_.mask_of_keys) {
      const MaskRows mask(p_.mask, sequence);
      for_each_key([&](float& x, int j) { x = mask.data[j * mask.col_stride] ? x : -INFINITY; });
    }
  }
  __device__ __forceinline__ bool hides_keys() const { return fminf(key_bias_[0], key_bias_[1]) == -INFINITY; }
  /// Zeroes weights and dS where the bias of a key is -inf: they may be NaN there.
  __device__ __forceinline__ void zero_hidden_keys(Weights& p, Weights& ds) const {
    const uint32_t kept[2] = {key_bias_[0] == -INFINITY ? 0u : ~0u, key_bias_[1] == -INFINITY ? 0u : ~0u};
    Tile::for_each_pair([&](int k, int e, int, int) {
      p[k][e] &= kept[e % 2];
      ds[k][e] &= kept[e % 2];
    });
  }

  /// The word of Philox random bits that this lane computes. A word has 32 weights, of which a lane has four: so each
  /// lane of the warpgroup computes one word.
  __device__ __forceinline__ uint32_t word_of_lane() const {
    static_assert(KeptTile<kBlockM>::kWordsOfGroup == kWarpgroupThreads);
    return 32 * ptx::reread(static_cast<uint32_t>(warp_)) + ptx::reread(static_cast<uint32_t>(lane_));
  }
  /// Computes which weights of a step are kept, while the step before adds up. The warps then wait for each other, even
  /// in steps in which they see nothing. So when they write words of a step, all have read the words of two steps
  /// before, which lie in the same slot: they did so before they met in the step between.
  __device__ __forceinline__ void compute_kept(const StepMetadata& metadata, At at) const {
    if (this->sees(metadata.tile)) {
      const uint32_t word = word_of_lane();
      const int i = metadata.tile * kBlockM + KeptTile<kBlockM>::query(word);
      const int j = work_tile_.first_key + warpgroup_ * kWarpgroupRows + KeptTile<kBlockM>::key(word);
      const RandomKey key{seeds_, options().batch_head + metadata.head};
      const auto query = QueryRandomBits::of(key, dropout_query_group(i));
      const auto keys = KeyRandomBits::of(key, dropout_key_group(j));
      store_shared(s_kept(at) + 4 * (warpgroup_ * kWarpgroupThreads + word),
                   draw_kept_weights(p_.dropout.rule, key, query, keys));
    }
    ptx::barrier_sync<kWarpgroupThreads>(BackwardBarriers<Config>::kept_written(warpgroup_));
  }
  __device__ __forceinline__ uint32_t s_kept(At at) const {
    return after_storage(layout_.kept + at.stage() * layout_.kept_bytes);
  }
  /// Reads words of two consecutive queries, of the k-th sixteen, as keep_pair() takes them.
  __device__ __forceinline__ uint2 load_kept(int k) const {
    const uint32_t lane = static_cast<uint32_t>(lane_), s_lane = s_kept(at_) + KeptTile<kBlockM>::at(warpgroup_, lane);
    const int shift = KeptTile<kBlockM>::shift(16 * warp_, lane);
    const auto words = load_shared<uint2>(s_lane + k * KeptTile<kBlockM>::kStepBytes);
    return {words.x << shift, words.y << shift};
  }

  const BackwardOptionsLayout& layout_;
  float key_bias_[2] = {0.0f, 0.0f};
  PhiloxKey seeds_ = {};
};

}  // namespace flash_ext::sm90
