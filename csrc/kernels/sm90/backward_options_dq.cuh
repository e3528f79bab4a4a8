// The warpgroup that loads and computes dQ, where a call has options: it finds the steps, and brings what they need.
#pragma once

#include "../ptx/cp_async_barrier.h"
#include "backward_dq.cuh"
#include "backward_options_work.cuh"

namespace flash_ext::sm90 {

/// What one warp of it does.
template <class Config>
class OptionsDq : BackwardDq<Config, OptionsState<Config>> {
 public:
  using State = OptionsState<Config>;
  using Base = BackwardDq<Config, State>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kGroups = Config::kGroups;

  __device__ __forceinline__ OptionsDq(const BackwardParams& p, const BackwardMaps& maps,
                                       const sm80::BackwardWorkspace& workspace, const OptionsLayout& layout,
                                       State& state, uint32_t s_tiles, int warp, int lane)
      : Base(p, maps, workspace, state, s_tiles, warp, lane), layout_(layout) {}

  __device__ __forceinline__ void run() {
    Step now = visible(first_step());
    if (is_past(now)) return note(now, 0);
    Step next = visible_after(now);
    if (warp_ == 0) this->load_first(now, next);
    copy_bias(now);
    if (layout_.bias_places > 1) copy_bias(next);
    note(now, 0);
    note(next, 1);
#pragma unroll 1
    while (true) {
      // Who hands dS over has read the bias, the bits and the words.
      wait_for(state_.ds_full[at_.stage()], at_.parity());
      if (layout_.bias_places == 1) copy_bias(next);
      this->add(now);
      if (is_past(next)) break;
      const Step after = visible_after(next);
      if (layout_.bias_places > 1) copy_bias(after);
      if (warp_ == 0) this->load_in_place(after);
      note(after, at_.stage());
      at_.advance();
      now = next;
      next = after;
    }
    if (lane_ == 0) ptx::tma_store_wait();
  }

 private:
  using Base::at_;
  using Base::lane_;
  using Base::p_;
  using Base::state_;
  using Base::warp_;
  using Base::work_;
  using Base::workspace_;

  struct Step : BackwardStep {
    int state;  // by masks
  };

  __device__ __forceinline__ const sm80::BackwardOptions& options() const { return state_.options(); }
  __device__ __forceinline__ bool is_past(const Step& step) const { return step.head >= work_.heads; }
  __device__ __forceinline__ uint32_t behind_state(int offset) const { return ptx::shared_address(&state_) + offset; }

  __device__ __forceinline__ Step first_step() const { return {work_.first_step(), sm80::kTileVisible}; }
  __device__ __forceinline__ Step visible_after(Step step) const {
    work_.advance(step);
    return visible(step);
  }
  /// The step, or the first after it of which masks leave something.
  __device__ __forceinline__ Step visible(Step step) const {
    if (!options().masks) return step;
    const sm80::VisibilityTiles& tiles = workspace_.visibility;
    while (!is_past(step)) {
      const uint8_t* const states =
          tiles.states_of(work_.sequence.batch, work_.sequence.head + step.head, work_.first_key / kBlockN);
      const int tile = step.tile + lane_;
      const int state = tile < work_.tiles.end ? states[tiles.query_tiles > 1 ? tile : 0] : sm80::kTileHidden;
      const uint32_t found = __ballot_sync(~0u, state != sm80::kTileHidden);
      if (found) {
        const int first = __ffs(static_cast<int>(found)) - 1;
        step.tile += first;
        step.state = __shfl_sync(~0u, state, first);
        return step;
      }
      step.tile += 32;
      if (step.tile < work_.tiles.end) continue;
      step.tile = work_.tiles.begin;
      ++step.head;
    }
    return step;
  }

  __device__ __forceinline__ Sequence sequence_of(const Step& step) const {
    Sequence sequence = work_.sequence;
    sequence.head += step.head;
    return sequence;
  }

  /// To the next place: a panel for each warpgroup that computes.
  __device__ __forceinline__ void copy_bias(const Step& step) {
    if (layout_.bias_places == 0 || is_past(step)) return;
    const int place = layout_.bias_places > 1 ? bias_count_ % 2 : 0;
    const uint32_t s_place = behind_state(layout_.bias + place * layout_.bias_bytes);
    const Sequence sequence = sequence_of(step);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group)
      sm80::load_bias<kGroupThreads, kBlockM, kGroupRows>(s_place + group * (layout_.bias_bytes / kGroups), p_.bias,
                                                          layout_.copies_bias, sequence, step.tile * kBlockM,
                                                          work_.first_key + group * kGroupRows);
    announce(state_.bias_full[place]);
    ++bias_count_;
  }

  /// What the warps that compute must know of a step.
  __device__ __forceinline__ void note(const Step& step, int stage) const {
    if (!is_past(step)) {
      if (step.state == sm80::kTileMasked) {
        sm80::load_words<kGroupThreads, kBlockM, kBlockN>(behind_state(layout_.words + stage * layout_.words_bytes), p_,
                                                          workspace_.visibility, sequence_of(step), step.tile,
                                                          work_.first_key / kBlockN);
      }
      if (options().drops) draw(step, behind_state(layout_.dropped + stage * layout_.dropped_bytes));
    }
    if (warp_ == 0 && lane_ == 0) state_.notes[stage] = note_of(step);
    announce(state_.note_full[stage]);
  }
  /// What this warp has copied or written.
  __device__ __forceinline__ void announce(const uint64_t& barrier) const {
    ptx::cp_async_arrive(address(barrier));
    this->release(barrier);
  }
  __device__ __forceinline__ BackwardNote note_of(const Step& step) const {
    BackwardNote note{step.tile, 0, 0.0f};
    if (is_past(step)) return {0, kNotePast, 0.0f};
    if (step.state == sm80::kTileMasked) note.flags |= kNoteMasked;
    if (work_.is_cleaned(step.tile) || (options().hides && workspace_.unclean[this->workspace_tile(step)]))
      note.flags |= kNoteCleaned;
    if (options().slopes) note.slope = options().slopes[step.head] * kLog2E;
    return note;
  }

  /// Which weights are dropped: for each lane of the warps that compute, bit 2 n + r + 16 c is that of the query
  /// 8 n + 2 (lane % 4) + c and the key lane / 4 + 8 r. A call of Philox serves two warps, and the queries i, i + 8.
  __device__ __forceinline__ void draw(const Step& step, uint32_t s_dropped) const {
    const sm80::BackwardOptions& options = this->options();
    const PhiloxKey key = options.key;
    const uint32_t last_dropped = options.last_dropped, batch_head = options.batch_head + step.head;
#pragma unroll 1
    for (int part = warp_; part < 4 * kGroups; part += kGroupWarps) {
      const int half = part % 2, warps = part / 2;  // 32 queries; two warps
      const int i = step.tile * kBlockM + 32 * half + 2 * (lane_ % 4), j = work_.first_key + 32 * warps + lane_ / 4;
      uint32_t bits[2] = {0, 0};
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const PhiloxWords words = dropout_words(key, batch_head, i + 16 * m + c, j);
#pragma unroll
          for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int h = 0; h < 2; ++h)
              if ((h ? words.word[w] : words.word[w] << 16) <= last_dropped)
                bits[w / 2] |= 1u << (4 * m + 2 * h + w % 2 + 16 * c);
        }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t s_bytes = s_dropped + ((2 * warps + w) * 32 + lane_) * 4 + half;
        sm80::store_shared(s_bytes, static_cast<uint8_t>(bits[w]));
        sm80::store_shared(s_bytes + 2, static_cast<uint8_t>(bits[w] >> 16));
      }
    }
  }

  const OptionsLayout& layout_;
  uint32_t bias_count_ = 0;
};

}  // namespace flash_ext::sm90
