// The warpgroups that compute scores, where a call has options. What options do to a tile of scores are passes over
// accumulators; a kernel of any options has a branch for the whole tile before each.
#pragma once

#include <cfloat>

#include "../ptx/ldmatrix.h"
#include "../ptx/pair_masks.h"
#include "backward_group.cuh"
#include "backward_options_work.cuh"

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
      if (Config::template has<kNoteDrops>(note.flags) && this->sees(note.tile)) draw(note, at_);
#pragma unroll 1
      do {
        note = visit(note);
        at_.advance();
      } while (!(note.flags & kNotePast));
    }
    this->store(p_.dv, Base::dv_, unit);
    this->store(p_.dk, Base::dk_, static_cast<float>(p_.softmax_scale) * unit);
  }

 private:
  using Base::at_;
  using Base::group_;
  using Base::lane_;
  using Base::p_;
  using Base::state_;
  using Base::warp_;
  using Base::work_;

  __device__ __forceinline__ const sm80::BackwardOptions& options() const { return state_.options(); }
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

  /// The plain step, but for dS, which begins as P, times the derivative of the softcap: of dropped weights, too.
  template <class LookAhead>
  __device__ __forceinline__ void step(const BackwardNote& note, bool hides, LookAhead look_ahead) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::start(s, Base::keys_, this->query_tile());
    Products::finish(s);
    weigh(s, note);
    if (hides) this->hide(s, note.tile);
    pack_operand<Element>(p, s);
    const bool may_hide =
        Config::template has<kNoteMasked>(note.flags) || Config::template has<kNoteBiased>(note.flags);
    hides |= Config::kAny && may_hide;
    if (hides && bias_by_pairs()) hide_by_bias(p);
    if (Config::template has<kNoteMasked>(note.flags)) hide_by_words(p);
    for_each_pair([&](int k, int e) { ds[k][e] = p[k][e]; });
    if (Config::template has<kNoteCapped>(note.flags)) multiply_by_slopes(ds, hides);
    if (Config::template has<kNoteDrops>(note.flags)) drop(p);
    this->multiply_grads(s);
    if (Config::template has<kNoteDrops>(note.flags)) clear_dropped(s);
    this->differentiate(ds, s, ds, hides);
    if (!Config::kAny && may_hide && !hides && holds_nan(ds)) clear_hidden(ds, p);
    this->hand_over(ds);
    this->add_up(p, ds, look_ahead);
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
        x = ptx::exp2_approx(alibi.add(fmaf(x, scale, -term), n, e));
      });
    } else {
      Tile::weigh(s, lse, scale, lane_);
    }
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
        const uint32_t product = sm80::multiply_pairs<Element>(ds[k][e], slopes[e]);
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
  /// Of 16 bits; the kernel of calls without another option serves that of the inputs alone.
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
    using Layout = sm80::TileLayout<float, kGroupRows>;
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
          x = fmaf(sm80::load_shared<float>(s_first + 8 * n * Layout::kRowBytes), kLog2E, x);
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
      const uint2 words = sm80::load_shared<uint2>(s_words + 32 * n);
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

  /// Which weights of a step are dropped, while the one before adds up: bit 2 n + r + 16 c of a lane is that of the
  /// query 8 n + 2 (lane % 4) + c and the key lane / 4 + 8 r. A call of Philox decides the keys of two warps and the
  /// queries i, i + 8; so each of the two draws for 32 queries and both. They then wait for each other: what they left
  /// there two steps before has been read.
  __device__ __forceinline__ void draw(const BackwardNote& note, At at) const {
    const sm80::BackwardOptions& options = this->options();
    const int lane = ptx::reread(lane_), pair = warp_ / 2, half = warp_ % 2;
    const int i = note.tile * kBlockM + 32 * half + 2 * (lane % 4);
    const int j = work_.first_key + group_ * kGroupRows + 32 * pair + lane / 4;
    uint32_t bits[2] = {0, 0};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const PhiloxWords words = dropout_words(options.key, options.batch_head + note.head, i + 16 * m + c, j);
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if ((h ? words.word[w] : words.word[w] << 16) <= options.last_dropped)
              bits[w / 2] |= 1u << (4 * m + 2 * h + w % 2 + 16 * c);
      }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t s_bytes = s_dropped(2 * pair + w, at) + half;
      sm80::store_shared(s_bytes, static_cast<uint8_t>(bits[w]));
      sm80::store_shared(s_bytes + 2, static_cast<uint8_t>(bits[w] >> 16));
    }
    ptx::barrier_any<64>(kFirstPairBarrier + 2 * group_ + pair, false);
  }
  /// This lane's word of a warp of the warpgroup.
  __device__ __forceinline__ uint32_t s_dropped(int warp, At at) const {
    return behind_state(layout_.dropped + at.stage() * layout_.dropped_bytes) +
           4 * (group_ * kGroupThreads + warp * 32 + ptx::reread(lane_));
  }

  __device__ __forceinline__ void drop(Weights& p) const {
    const auto dropped = sm80::load_shared<uint32_t>(s_dropped(warp_, at_));
#pragma unroll
    for (int bit = 0; bit < 8; ++bit) {
      const uint32_t at_signs = dropped << (7 - bit);
      p[bit / 4][bit % 4] &= ~ptx::spread_low_signs(at_signs);
      p[2 + bit / 4][bit % 4] &= ~ptx::spread_signs(at_signs);
    }
  }

  /// dP of what is dropped: bits are read again, as tests of them before dP would fill registers.
  __device__ __forceinline__ void clear_dropped(Scores& dp) const {
    const auto dropped = sm80::load_shared<uint32_t>(s_dropped(warp_, at_));
    for_each_score(dp, [&](float& x, int, int n, int e) {
      if (dropped >> (2 * n + e / 2 + e % 2 * 16) & 1u) x = 0.0f;
    });
  }

  const OptionsLayout& layout_;
};

}  // namespace flash_ext::sm90
