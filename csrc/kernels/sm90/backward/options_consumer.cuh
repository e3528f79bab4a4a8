// The warpgroups that compute scores, where a call has options. What options do to a tile of scores are passes over
// accumulators; a kernel of any options has a branch for the whole tile before each.
#pragma once

#include <cfloat>

#include "consumer.cuh"
#include "kernels/ptx/ldmatrix.h"
#include "kernels/ptx/pair_masks.h"
#include "options_storage.cuh"

namespace flash_ext::sm90 {

/// What one warp of them does.
template <class Config>
class OptionsGroup : BackwardGroup<Config, OptionsState<Config>> {
 public:
  using State = OptionsState<Config>;
  using Base = BackwardGroup<Config, State>;
  using typename Base::Element;
  using typename Base::Products;
  using typename Base::Scores;
  using typename Base::Tile;
  using typename Base::Weights;
  static constexpr int kFirstPairBarrier = 2 + Config::kGroups;  // of two warps
  // Whether dS is made of P times the derivative of the softcap. Where there may be dropout, it comes last.
  static constexpr bool kSlopesFirst = !Config::kAny && Config::may_have(kNoteCapped);
  static constexpr int kBlockM = Config::kBlockM, kN = Tile::kN, kSteps = Tile::kSteps;

  __device__ __forceinline__ OptionsGroup(const BackwardParams& p, const OptionsLayout& layout, State& state,
                                          uint32_t s_tiles, int group, int lane)
      : Base(p, state, s_tiles, 0.0f, group, lane), layout_(layout) {}

  /// `unit`: of the workspace.
  __device__ __forceinline__ void run(float unit) {
    this->clear_sums();
    BackwardNote note = read_note(at_);
    if (!(note.flags & kNotePast)) {
      this->clean_keys();
      if (Config::template has<kNoteKeyBiased>(note.flags)) load_key_bias(note.head);
      if (Config::template has<kNoteDrops>(note.flags) && this->sees(note.tile)) draw(note, at_);
#pragma unroll 1
      do {
        note = visit(note);
        at_.advance();
      } while (!(note.flags & kNotePast));
    }
    this->store_dv(Base::dv_, unit);
    this->store_dk(Base::dk_, static_cast<float>(p_.softmax_scale) * unit);
  }

 private:
  using Base::at_;
  using Base::group_;
  using Base::lane_;
  using Base::p_;
  using Base::state_;
  using Base::warp_;
  using Base::work_;

  __device__ __forceinline__ const BackwardOptions& options() const { return state_.options(); }
  __device__ __forceinline__ uint32_t behind_state(int offset) const { return ptx::shared_address(&state_) + offset; }

  using At = RingCount<Config::kStages>;

  __device__ __forceinline__ BackwardNote read_note(At at) const {
    wait_for(state_.note_full[at.stage()], at.parity());
    return state_.notes[at.stage()];
  }

  /// The note after this one: it is read, and its weights are drawn in part, beside the last products of the step.
  __device__ __forceinline__ BackwardNote visit(const BackwardNote& note) {
    BackwardNote after;
    const auto look_ahead = [&] {
      At next = at_;
      next.advance();
      after = read_note(next);
      if (Config::template has<kNoteKeyBiased>(after.flags) && after.head != note.head && !(after.flags & kNotePast))
        load_key_bias(after.head);
      if (!(after.flags & kNotePast) && Config::template has<kNoteDrops>(after.flags) && this->sees(after.tile))
        draw(after, next);
    };
    if (note.flags & kNoteCleaned) this->clean_rows();
    if (this->sees(note.tile)) {
      step(note, this->hides(note.tile), look_ahead);
    } else {
      if (Config::template has<kNoteBiased>(note.flags)) wait_for_bias();
      this->pass();
      look_ahead();
    }
    return after;
  }

  /// The plain step, and what options make of its scores and weights.
  template <class LookAhead>
  __device__ __forceinline__ void step(const BackwardNote& note, bool hides, LookAhead look_ahead) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::start(s, Base::keys_, this->query_tile());
    Products::finish(s);
    if constexpr (kSlopesFirst) {
      weigh_capped(p, ds, s);
      if (hides) {
        this->hide(p, note.tile);
        this->hide(ds, note.tile);
      }
    } else {
      weigh(s, note);
      if (hides) this->hide(s, note.tile);
      pack_operand<Element>(p, s);
    }
    const bool may_hide =
        Config::template has<kNoteMasked>(note.flags) || Config::template has<kNoteBiased>(note.flags);
    uint32_t dropped = 0;
    hide_by_options(p, note, hides);
    if (Config::template has<kNoteDrops>(note.flags)) dropped = dropped_weights();
    this->multiply_grads(s);
    if constexpr (kSlopesFirst) {
      this->differentiate(ds, s, ds, hides);
    } else if (Config::template has<kNoteDrops>(note.flags)) {
      Tile::template differentiate_kept<Config::kAny>(
          ds, s, p, state_.minus_delta[at_.stage()], lane_,
          [&](int n, int r, uint32_t pair) { return keep(dropped, n, r, pair); });
      if (!Config::kAny && hides) this->hide(ds, note.tile);
    } else {
      this->differentiate(ds, s, p, hides || (Config::kAny && may_hide));
    }
    if (!kSlopesFirst && Config::template has<kNoteCapped>(note.flags))
      multiply_by_slopes(ds, hides || (Config::kAny && may_hide));
    if (!Config::kAny && may_hide && !hides && holds_nan(ds)) clear_hidden(ds, p);
    if (Config::template has<kNoteKeyBiased>(note.flags) && __any_sync(~0u, hides_keys())) clear_hidden_keys(p, ds);
    this->hand_over(ds);
    this->add_up(p, ds, look_ahead);
  }

  /// What bias and masks hide. A kernel without tests looks for NaN in dS instead, where the window hides nothing.
  __device__ __forceinline__ void hide_by_options(Weights& weights, const BackwardNote& note, bool hides) const {
    if ((Config::kAny || hides) && Config::template has<kNoteBiased>(note.flags) && bias_by_pairs())
      hide_by_bias(weights);
    if (Config::template has<kNoteMasked>(note.flags)) hide_by_words(weights);
  }

  /// Of an operand: f(k, e) for each register. 4 k + e is 2 n + r.
  template <class F>
  __device__ __forceinline__ static void for_each_pair(F f) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(k, e);
  }

  /// Weights in place of products. What one option makes of scores is one pass with their exponentials.
  __device__ __forceinline__ void weigh(Scores& s, const BackwardNote& note) const {
    float scale = options().scale;
    if (Config::template has<kNoteCapped>(note.flags)) {
      cap(s, scale);
      scale = options().cap;
    }
    const float* const lse = state_.lse[at_.stage()];
    const AlibiOfLane alibi = alibi_of(note);
    const bool is_sloped = Config::template has<kNoteSloped>(note.flags);
    if (bias_by_pairs()) {
      const auto sloped = [&](float x, int n, int e) { return alibi.add(x, n, e); };
      const auto level = [](float x, int, int) { return x; };
      is_sloped ? weigh_biased(s, scale, sloped) : weigh_biased(s, scale, level);
    } else if (Config::template has<kNoteBiased>(note.flags)) {
      // A sum that overflowed must not make a NaN of what is hidden: what a query does see of it, its lse knows.
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int n, int e) {
        x = alibi.add(fminf(x * scale, FLT_MAX) - term, n, e);
      });
      add_bias_32(s);
      for_each_score(s, [](float& x, int, int, int) { x = ptx::exp2_approx(x); });
    } else if (is_sloped) {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int n, int e) {
        x = ptx::exp2_approx(alibi.add(fmaf(x, scale, rest_of(term, e)), n, e));
      });
    } else if (Config::may_have(kNoteKeyBiased)) {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int, int e) {
        x = ptx::exp2_approx(fmaf(x, scale, rest_of(term, e)));
      });
    } else {
      Tile::weigh(s, lse, scale, lane_);
    }
  }

  /// Where scores are capped and no more: P, and P times the derivative of the softcap.
  __device__ __forceinline__ void weigh_capped(Weights& p, Weights& sloped, Scores& s) const {
    const float scale = options().scale, cap = options().cap;
    for_each_score(s, [&](float& x, int, int, int) { x = ScoreRules<Element>::tanh(x * scale); });
    const float* const s_lane = state_.lse[at_.stage()] + 2 * (ptx::reread(lane_) % 4);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 term = *reinterpret_cast<const float2*>(s_lane + 8 * n);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* const t = &s[0][n][2 * r];
        const float low = ptx::exp2_approx(fmaf(t[0], cap, -term.x));
        const float high = ptx::exp2_approx(fmaf(t[1], cap, -term.y));
        p[n / 2][n % 2 * 2 + r] = ptx::pack2<Element>(low, high);
        sloped[n / 2][n % 2 * 2 + r] =
            ptx::pack2<Element>(low * fmaf(-t[0], t[0], 1.0f), high * fmaf(-t[1], t[1], 1.0f));
      }
    }
  }
  /// What is added to a scaled score before ALiBi.
  __device__ __forceinline__ float rest_of(float term, int e) const {
    return Config::may_have(kNoteKeyBiased) ? key_bias_[e / 2] - term : -term;
  }

  /// Scores over the cap, capped. The derivative waits where dS will be.
  __device__ __forceinline__ void cap(Scores& s, float scale) const {
    for_each_score(s, [&](float& x, int, int, int) { x = ScoreRules<Element>::tanh(x * scale); });
    this->wait_for_ds_room();
    const uint32_t s_row = row_of_lane(this->s_ds());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t slopes[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* const t = &s[0][2 * k + e / 2][e % 2 * 2];
        slopes[e] = ptx::pack2<Element>(fmaf(-t[0], t[0], 1.0f), fmaf(-t[1], t[1], 1.0f));
      }
      Tile::store(s_row, k, slopes);
    }
    __syncwarp();
  }

  /// A slope of NaN, of a sum that overflowed, must not reach what is hidden.
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

  struct AlibiOfLane {
    float slope, distance;  // of the lane's first key from what its first query is aligned with

    __device__ __forceinline__ float add(float x, int n, int e) const {
      return fmaf(-slope, fabsf(distance + static_cast<float>(8 * n + e % 2 - 8 * (e / 2))), x);
    }
  };
  __device__ __forceinline__ AlibiOfLane alibi_of(const BackwardNote& note) const {
    const int lane = ptx::reread(lane_);
    const int first_query = note.tile * kBlockM + 2 * (lane % 4), first_key = this->first_key() + lane / 4;
    return {note.slope, static_cast<float>(first_query + work_.sequence.offset - first_key)};
  }

  __device__ __forceinline__ uint32_t bias_place() const { return layout_.bias_places > 1 ? at_.stage() : 0; }
  __device__ __forceinline__ void wait_for_bias() const {
    const uint32_t parity = layout_.bias_places > 1 ? at_.parity() : at_.count % 2;
    wait_for(state_.bias_full[bias_place()], parity);
  }
  /// Of this warpgroup.
  __device__ __forceinline__ uint32_t s_bias() const {
    return behind_state(layout_.bias + bias_place() * layout_.bias_bytes +
                        group_ * (layout_.bias_bytes / Config::kGroups));
  }
  /// Of 16 bits; the kernels of certain options serve that of the inputs alone.
  __device__ __forceinline__ bool bias_by_pairs() const {
    return Config::kAny ? layout_.bias_by_pairs : Config::may_have(kNoteBiased);
  }
  __device__ __forceinline__ bool bias_is_half() const {
    return Config::kAny ? p_.bias.dtype == DType::kFloat16 : std::is_same_v<Element, __half>;
  }
  template <class Added>
  __device__ __forceinline__ void weigh_biased(Scores& s, float scale, Added added) const {
    bias_is_half() ? weigh_biased<__half>(s, scale, added) : weigh_biased<__nv_bfloat16>(s, scale, added);
  }
  template <class T, class Added>
  __device__ __forceinline__ void weigh_biased(Scores& s, float scale, Added added) const {
    Weights bias;
    wait_for_bias();
    Tile::load(bias, row_of_lane(s_bias()));
    Tile::for_each_with_term(s, state_.lse[at_.stage()], lane_, [&](float& x, float term, int n, int e) {
      const float2 pair = ptx::unpack2<T>(bias[n / 2][n % 2 * 2 + e / 2]);
      const float rest = fmaf(e % 2 ? pair.y : pair.x, kLog2E, -term);
      x = ptx::exp2_approx(added(fmaf(x, scale, rest), n, e));
    });
  }
  /// Where it is -inf, it hides what may be NaN without it, as of a sum that overflowed.
  __device__ __forceinline__ void hide_by_bias(Weights& p) const {
    bias_is_half() ? hide_by_bias<__half>(p, 0xFC00FC00u) : hide_by_bias<__nv_bfloat16>(p, 0xFF80FF80u);
  }
  template <class T>
  __device__ __forceinline__ void hide_by_bias(Weights& p, uint32_t hidden) const {
    const uint32_t s_row = row_of_lane(s_bias());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t pairs[4];
      Tile::load(pairs, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[k][e] &= ptx::differs<T>(pairs[e], hidden);
    }
  }
  __device__ __forceinline__ void add_bias_32(Scores& s) const {
    wait_for_bias();
    const uint32_t s_panel = s_bias();
    using Layout = TileLayout<float, kGroupRows>;
    const int lane = ptx::reread(lane_), key = 16 * warp_ + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // Queries 8 rows further on lie in the same column of the swizzle.
        const uint32_t s_first = s_panel + key % 4 * 4 + Layout::at(2 * (lane % 4) + c, key / 4 + 2 * r);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          float& x = s[0][n][2 * r + c];
          x = fmaf(load_shared<float>(s_first + 8 * n * Layout::kRowBytes), kLog2E, x);
        }
      }
  }

  /// A word has a query's 32 keys, those of two warps.
  __device__ __forceinline__ void hide_by_words(Weights& p) const {
    const int lane = ptx::reread(lane_), shift = 7 - lane / 4;
    const uint32_t keys_of_warp = warp_ % 2 ? 0x7632 : 0x5410;  // of two words, as __byte_perm takes them
    const uint32_t s_words = behind_state(layout_.words + at_.stage() * layout_.words_bytes) +
                             4 * ((2 * group_ + warp_ / 2) * kBlockM + 2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint2 words = load_shared<uint2>(s_words + 32 * n);
      const uint32_t visible = __byte_perm(words.x, words.y, keys_of_warp) << shift;
      p[n / 2][n % 2 * 2] &= ptx::spread_low_signs(visible);
      p[n / 2][n % 2 * 2 + 1] &= ptx::spread_signs(visible);
    }
  }

  /// Whether some number of the warp is NaN, or two of them are infinite. To look costs half of what it costs to clear.
  __device__ __forceinline__ static bool holds_nan(const Weights& ds) {
    uint32_t sum = 0;
    for_each_pair([&](int k, int e) { sum = ptx::add_pairs<Element>(sum, ds[k][e]); });
    return __any_sync(~0u, ptx::differs<Element>(sum, sum) != 0);
  }
  /// dS where the weight is 0: dP may be NaN there, and so may P be where a bias hides.
  __device__ __forceinline__ void clear_hidden(Weights& ds, Weights& p) const {
    if (bias_by_pairs()) hide_by_bias(p);
    for_each_pair([&](int k, int e) { ds[k][e] &= ptx::differs<Element>(p[k][e], 0); });
  }

  /// Of a head, for this lane's keys, to base 2.
  __device__ __forceinline__ void load_key_bias(int head) {
    Sequence sequence = work_.sequence;
    sequence.head += head;
    // Behind the last key there are no weights. Branches of single lanes would take what is the same for all of them
    // out of uniform registers.
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
  /// Where the bias of a key is -inf. Weights and dS may be NaN there.
  __device__ __forceinline__ void clear_hidden_keys(Weights& p, Weights& ds) const {
    const uint32_t kept[2] = {key_bias_[0] == -INFINITY ? 0u : ~0u, key_bias_[1] == -INFINITY ? 0u : ~0u};
    for_each_pair([&](int k, int e) {
      p[k][e] &= kept[e % 2];
      ds[k][e] &= kept[e % 2];
    });
  }

  /// Which weights of a step are dropped, while the one before adds up. A call of Philox decides the keys of two warps
  /// and the queries i, i + 8; so each of the two draws for 32 queries and both. They then wait for each other: what
  /// they left there two steps before has been read. A lane has a word for each 32 queries: byte 2 h + c has those of
  /// the queries 16 m + 8 h + 2 (lane % 4) + c and the keys lane / 4 + 8 r, at bit 3 - 2 m - r.
  __device__ __forceinline__ void draw(const BackwardNote& note, At at) const {
    const unsigned warp = ptx::reread(warp_), lane = ptx::reread(lane_), pair = warp / 2, half = warp % 2;
    const DrawKey key{options().key, options().batch_head + note.head};
    const uint32_t key_group = (work_.first_key + group_ * kGroupRows) / 4 + 8 * pair + lane / 4;
    const uint32_t query_group = (note.tile * (kBlockM / 16) + 2 * half) * 8 + 2 * (lane % 4);
    const KeyDraws keys = KeyDraws::of(key, key_group);
    uint32_t bits[2] = {0, 0};
#pragma unroll
    for (int c = 1; c >= 0; --c) {
      PhiloxWords words[2];
      draw_words(words, key, query_group + c, keys);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int shift = c == 0 && m == 0 && w % 2 == 0 ? 5 : 1;  // from the other c's byte
          bits[w / 2] = (bits[w / 2] << shift) + layout_.drop_limit.flags(words[m].word[w]);
        }
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) store_shared(s_dropped(2 * pair + w, at) + 4 * half, bits[w]);
    ptx::barrier_any<64>(kFirstPairBarrier + 2 * group_ + pair, false);
  }
  /// This lane's words of a warp of the warpgroup.
  __device__ __forceinline__ uint32_t s_dropped(int warp, At at) const {
    return behind_state(layout_.dropped + at.stage() * layout_.dropped_bytes) +
           8 * (group_ * kGroupThreads + warp * 32 + ptx::reread(lane_));
  }

  /// Of this lane: byte 2 h + c has those of 64 queries, at bit 3 - 2 m - r those of the first 32.
  __device__ __forceinline__ uint32_t dropped_weights() const {
    const auto halves = load_shared<uint2>(s_dropped(warp_, at_));
    return halves.x + (halves.y << 4);
  }
  /// What is left of the pair of n and r.
  __device__ __forceinline__ static uint32_t keep(uint32_t dropped, int n, int r, uint32_t pair) {
    const uint32_t at_signs = dropped << (4 - n / 4 * 4 + n / 2 % 2 * 2 + r);
    return pair & ~(n % 2 ? ptx::spread_byte_signs<1>(at_signs) : ptx::spread_byte_signs<0>(at_signs));
  }

  const OptionsLayout& layout_;
  float key_bias_[2] = {0.0f, 0.0f};
};

}  // namespace flash_ext::sm90
