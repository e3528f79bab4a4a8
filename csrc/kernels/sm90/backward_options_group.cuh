// The warpgroups that compute scores, where a call has options. What options do to a tile of scores are passes over
// accumulators, each behind one branch for the whole tile.
#pragma once

#include <cfloat>

#include "../ptx/ldmatrix.h"
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
#pragma unroll 1
    for (;; at_.advance()) {
      wait_for(state_.note_full[at_.stage()], at_.parity());
      const BackwardNote note = state_.notes[at_.stage()];
      if (note.flags & kNotePast) break;
      if (at_.count == 0) this->clean_keys();
      if (note.flags & kNoteCleaned) this->clean_rows();
      if (this->sees(note.tile)) {
        step(note, this->hides(note.tile));
      } else {
        if (note.flags & kNoteBiased) wait_for_bias();
        this->pass();
      }
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

  /// The plain step, but for dS, which begins as P, times the derivative of the softcap: of dropped weights, too.
  __device__ __forceinline__ void step(const BackwardNote& note, bool hides) {
    Scores s;
    Weights p, ds;
    this->wait_for_query();
    Products::start(s, Base::keys_, this->query_tile());
    if (note.flags & kNoteDrops) draw(note);
    Products::finish(s);
    weigh(s, note);
    if (hides) this->hide(s, note.tile);
    if (note.flags & kNoteMasked) hide_by_words(s);
    pack_operand<Element>(p, s);
    for_each_pair([&](int k, int e) { ds[k][e] = p[k][e]; });
    if (note.flags & kNoteCapped) multiply_by_slopes(ds);
    if (note.flags & kNoteDrops) {
      const sm80::DroppedWeights dropped{dropped_bits()};
      for_each_pair([&](int k, int e) { p[k][e] &= ~dropped.mask(4 * k + e); });
    }

    this->multiply_grads(s);
    if (note.flags & kNoteDrops) drop(s);
    this->differentiate(ds, s, ds, hides || (note.flags & (kNoteMasked | kNoteBiased)));
    this->hand_over(ds);
    this->add_up(p, ds);
  }

  /// Of an operand: f(k, e) for each register. 4 k + e is 2 n + r.
  template <class F>
  __device__ __forceinline__ static void for_each_pair(F f) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(k, e);
  }

  /// Weights in place of products.
  __device__ __forceinline__ void weigh(Scores& s, const BackwardNote& note) const {
    subtract_lse(s, note);
    if (note.slope != 0.0f) add_alibi(s, note);
    if (note.flags & kNoteBiased) add_bias(s);
    for_each_score(s, [](float& x, int, int, int) { x = ptx::exp2_approx(x); });
  }

  /// The derivative of a softcap waits where dS will be.
  __device__ __forceinline__ void subtract_lse(Scores& s, const BackwardNote& note) const {
    const float scale = options().scale;
    const float* const lse = state_.lse[at_.stage()];
    // A sum that overflowed must not make a NaN of what is hidden: what a query does see of it, its lse knows.
    const auto scaled = [&](float x) { return fminf(x * scale, FLT_MAX); };
    if (note.flags & kNoteCapped) {
      const float cap = options().cap;
      for_each_score(s, [&](float& x, int, int, int) { x = ScoreRules<Element>::tanh(scaled(x)); });
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
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int, int) { x = fmaf(x, cap, -term); });
    } else if (note.flags & kNoteBiased) {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int, int) { x = scaled(x) - term; });
    } else {
      Tile::for_each_with_term(s, lse, lane_, [&](float& x, float term, int, int) { x = fmaf(x, scale, -term); });
    }
  }

  __device__ __forceinline__ void multiply_by_slopes(Weights& ds) const {
    const uint32_t s_row = row_of_lane(this->s_ds());
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t slopes[4];
      Tile::load(slopes, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[k][e] = sm80::multiply_pairs<Element>(ds[k][e], slopes[e]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t row_of_lane(uint32_t s_panel) const {
    return Tile::row_of_lane(s_panel, warp_, lane_);
  }

  __device__ __forceinline__ void add_alibi(Scores& s, const BackwardNote& note) const {
    const int lane = ptx::reread(lane_);
    const int first_query = note.tile * kBlockM + 2 * (lane % 4);
    const int first_key = this->first_key() + lane / 4;
    const float slope = note.slope, distance = static_cast<float>(first_query + work_.sequence.offset - first_key);
    for_each_score(s, [&](float& x, int, int n, int e) {
      x = fmaf(-slope, fabsf(distance + static_cast<float>(8 * n + e % 2 - 8 * (e / 2))), x);
    });
  }

  __device__ __forceinline__ uint32_t bias_place() const { return layout_.bias_places > 1 ? at_.stage() : 0; }
  __device__ __forceinline__ void wait_for_bias() const {
    const uint32_t parity = layout_.bias_places > 1 ? at_.parity() : at_.count % 2;
    wait_for(state_.bias_full[bias_place()], parity);
  }
  __device__ __forceinline__ void add_bias(Scores& s) const {
    wait_for_bias();
    const uint32_t s_panel = behind_state(layout_.bias + bias_place() * layout_.bias_bytes +
                                          group_ * (layout_.bias_bytes / Config::kGroups));
    switch (p_.bias.dtype) {
      case DType::kFloat16:
        return add_bias_16<__half>(s, s_panel);
      case DType::kBFloat16:
        return add_bias_16<__nv_bfloat16>(s, s_panel);
      default:
        return add_bias_32(s, s_panel);
    }
  }
  template <class T>
  __device__ __forceinline__ void add_bias_16(Scores& s, uint32_t s_panel) const {
    const uint32_t s_row = row_of_lane(s_panel);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t pairs[4];
      Tile::load(pairs, s_row, k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 bias = ptx::unpack2<T>(pairs[e]);
        float* const x = &s[0][2 * k + e / 2][e % 2 * 2];
        x[0] = fmaf(bias.x, kLog2E, x[0]);
        x[1] = fmaf(bias.y, kLog2E, x[1]);
      }
    }
  }
  __device__ __forceinline__ void add_bias_32(Scores& s, uint32_t s_panel) const {
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
  __device__ __forceinline__ void hide_by_words(Scores& s) const {
    const int lane = ptx::reread(lane_), shift = warp_ % 2 * 16 + lane / 4;
    const uint32_t s_words = behind_state(layout_.words + at_.stage() * layout_.words_bytes) +
                             4 * ((2 * group_ + warp_ / 2) * kBlockM + 2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const uint2 words = sm80::load_shared<uint2>(s_words + 32 * n);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t word = (c ? words.y : words.x) >> shift;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (!(word >> (8 * r) & 1u)) s[0][n][2 * r + c] = 0.0f;
      }
    }
  }

  /// Which weights are dropped, while S is being multiplied: bit 2 n + r + 16 c of a lane is that of the query
  /// 8 n + 2 (lane % 4) + c and the key lane / 4 + 8 r. A call of Philox decides the keys of two warps and the queries
  /// i, i + 8; so each of the two draws for 32 queries and both.
  __device__ __forceinline__ void draw(const BackwardNote& note) const {
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
      const uint32_t s_bytes = s_dropped(2 * pair + w, lane) + half;
      sm80::store_shared(s_bytes, static_cast<uint8_t>(bits[w]));
      sm80::store_shared(s_bytes + 2, static_cast<uint8_t>(bits[w] >> 16));
    }
    ptx::barrier_any<64>(kFirstPairBarrier + 2 * group_ + pair, false);
  }
  /// The word of a lane of the warpgroup.
  __device__ __forceinline__ uint32_t s_dropped(int warp, int lane) const {
    return behind_state(layout_.dropped + at_.stage() * layout_.dropped_bytes) +
           4 * (group_ * kGroupThreads + warp * 32 + lane);
  }
  __device__ __forceinline__ uint32_t dropped_bits() const {
    return sm80::load_shared<uint32_t>(s_dropped(warp_, ptx::reread(lane_)));
  }

  /// dP of what is dropped.
  __device__ __forceinline__ void drop(Scores& dp) const {
    const sm80::DroppedWeights dropped{dropped_bits()};
    for_each_score(dp, [&](float& x, int, int n, int e) {
      if (dropped.is_dropped(2 * n + e / 2, e % 2)) x = 0.0f;
    });
  }

  const OptionsLayout& layout_;
};

}  // namespace flash_ext::sm90
