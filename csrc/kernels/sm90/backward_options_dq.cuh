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

  __device__ __forceinline__ OptionsDq(const BackwardParams& p, const BackwardMaps& maps, const CUtensorMap& bias_map,
                                       const sm80::BackwardWorkspace& workspace, const OptionsLayout& layout,
                                       State& state, uint32_t s_tiles, int warp, int lane)
      : Base(p, maps, workspace, state, s_tiles, warp, lane), bias_map_(bias_map), layout_(layout) {}

  __device__ __forceinline__ void run() {
    Step now = visible(first_step());
    if (is_past(now)) return note(now, note_of(now), 0);
    Step next = visible_after(now);
    if (warp_ == 0) this->load_first(now, next);
    copy_bias(now);
    if (layout_.bias_places > 1) copy_bias(next);
    note(now, note_of(now), 0);
    note(next, note_of(next), 1);
#pragma unroll 1
    while (true) {
      // What is asked of memory behind the additions to dQ waits for them, so it is asked before dS is there.
      const Step after = is_past(next) ? next : visible_after(next);
      const BackwardNote coming = note_of(after);
      // Who hands dS over has read the note, the bias and the words.
      wait_for(state_.ds_full[at_.stage()], at_.parity());
      Step copied = next;  // by `?:` its address would be chosen, and both would live in local memory
      if (layout_.bias_places > 1) copied = after;
      copy_bias(copied);
      if (!is_past(next)) note(after, coming, at_.stage());
      this->add(now);
      if (is_past(next)) break;
      if (warp_ == 0) this->load_in_place(after);
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
    ++bias_count_;
    if (layout_.bias_by_panels) return load_bias_panels(step, s_place, state_.bias_full[place]);
    const Sequence sequence = sequence_of(step);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group)
      sm80::load_bias<kGroupThreads, kBlockM, kGroupRows>(s_place + group * (layout_.bias_bytes / kGroups), p_.bias,
                                                          layout_.copies_bias, sequence, step.tile * kBlockM,
                                                          work_.first_key + group * kGroupRows);
    announce(state_.bias_full[place]);
  }
  __device__ __forceinline__ void load_bias_panels(const Step& step, uint32_t s_place, const uint64_t& barrier) const {
    if (warp_ == 0 && lane_ == 0) {
      const int head = p_.bias.head_stride ? work_.sequence.head + step.head : 0;
      const int batch = p_.bias.batch_stride ? work_.sequence.batch : 0;
      ptx::mbarrier_arrive_expect(address(barrier), layout_.bias_bytes);
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        ptx::tma_load(s_place + group * panel_bytes(kBlockM), &bias_map_, address(barrier),
                      work_.first_key + group * kGroupRows, step.tile * kBlockM, head, batch);
    }
    __syncwarp();
  }

  /// What the warps that compute must know of a step.
  __device__ __forceinline__ void note(const Step& step, const BackwardNote& note, int stage) const {
    if (note.flags & kNoteMasked) {
      sm80::load_words<kGroupThreads, kBlockM, kBlockN>(behind_state(layout_.words + stage * layout_.words_bytes), p_,
                                                        workspace_.visibility, sequence_of(step), step.tile,
                                                        work_.first_key / kBlockN);
    }
    if (warp_ == 0 && lane_ == 0) state_.notes[stage] = note;
    announce(state_.note_full[stage]);
  }
  /// What this warp has copied or written.
  __device__ __forceinline__ void announce(const uint64_t& barrier) const {
    ptx::cp_async_arrive(address(barrier));
    this->release(barrier);
  }
  __device__ __forceinline__ BackwardNote note_of(const Step& step) const {
    if (is_past(step)) return {0, 0, kNotePast, 0.0f};
    const sm80::BackwardOptions& options = this->options();
    BackwardNote note{step.tile, step.head, 0, 0.0f};
    if (step.state == sm80::kTileMasked) note.flags |= kNoteMasked;
    if (options.biased) note.flags |= kNoteBiased;
    if (options.cap > 0.0f) note.flags |= kNoteCapped;
    if (options.drops) note.flags |= kNoteDrops;
    const bool hides = note.flags & (kNoteMasked | kNoteBiased);
    if (work_.is_cleaned(step.tile) || (hides && workspace_.unclean[this->workspace_tile(step)]))
      note.flags |= kNoteCleaned;
    if (options.slopes) note.slope = options.slopes[step.head] * kLog2E;
    return note;
  }

  const CUtensorMap& bias_map_;
  const OptionsLayout& layout_;
  uint32_t bias_count_ = 0;
};

}  // namespace flash_ext::sm90
