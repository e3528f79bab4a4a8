// The warpgroup that loads and computes dQ, where a call has options: it finds the steps, and brings what they need.
#pragma once

#include "kernels/ptx/cp_async_barrier.h"
#include "options_steps.cuh"
#include "producer_dq.cuh"

namespace flash_ext::sm90 {

/// What one warp of it does.
template <class Config>
class OptionsDq : BackwardDq<Config, OptionsState<Config>> {
 public:
  using State = OptionsState<Config>;
  using Base = BackwardDq<Config, State>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kGroups = Config::kGroups;
  static constexpr int kTeller = 1;                    // the warp that tells of steps; warp 0 loads Q and dO
  static constexpr bool kFindsBeside = !Config::kAny;  // a product; ptxas has no registers for it with all options

  __device__ __forceinline__ OptionsDq(const BackwardParams& p, const BackwardMaps& maps, const CUtensorMap& bias_map,
                                       const BackwardWorkspace& workspace, const OptionsLayout& layout, State& state,
                                       uint32_t s_tiles, int warp, int lane)
      : Base(p, maps, workspace, state, s_tiles, warp, lane), bias_map_(bias_map), layout_(layout) {}

  __device__ __forceinline__ void run() {
    OptionsSteps<Config> steps(workspace_, layout_, state_, lane_);
    BackwardNote now = steps.next();
    if (is_past(now)) return by_threads() ? tell<true>(now, 0) : tell<false>(now, 0);
    BackwardNote next = steps.next();
    if (warp_ == 0) this->load_first(step_of(now), step_of(next));
    by_threads() ? prepare_first<true>(now, next) : prepare_first<false>(now, next);
#pragma unroll 1
    while (true) {
      BackwardNote after;
      if (!kFindsBeside || by_threads()) after = steps.next();
      if (by_threads()) {
        wait_for(state_.ds_full[at_.stage()], at_.parity());
        prepare<true>(next, after);
      }
      this->add(step_of(now), [&] {
        if (by_threads()) return;
        if (kFindsBeside) after = steps.next();
        prepare<false>(next, after);
      });
      if (is_past(next)) break;
      if (warp_ == 0) this->load_in_place(step_of(after));
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

  __device__ __forceinline__ static bool is_past(const BackwardNote& note) { return note.flags & kNotePast; }
  __device__ __forceinline__ static BackwardStep step_of(const BackwardNote& note) { return {note.head, note.tile}; }
  __device__ __forceinline__ uint32_t behind_state(int offset) const { return ptx::shared_address(&state_) + offset; }

  __device__ __forceinline__ Sequence sequence_of(const BackwardNote& note) const {
    Sequence sequence = work_.sequence;
    sequence.head += note.head;
    return sequence;
  }

  /// Whether all threads bring what comes with steps, with registers that a product beside has no room for; else the
  /// TMA does.
  __device__ __forceinline__ bool by_threads() const {
    return Config::kAny ? layout_.by_threads : Config::may_have(kNoteMasked) && layout_.makes_words;
  }

  template <bool kByThreads>
  __device__ __forceinline__ void prepare_first(const BackwardNote& now, const BackwardNote& next) const {
    copy_bias<kByThreads>(now, 0);
    if (layout_.bias_places > 1) copy_bias<kByThreads>(next, 1);
    tell<kByThreads>(now, 0);
    tell<kByThreads>(next, 1);
  }
  /// Of the steps after this one. Who has handed dS of this one over has read its note, bias and words.
  template <bool kByThreads>
  __device__ __forceinline__ void prepare(const BackwardNote& next, const BackwardNote& after) const {
    if (layout_.bias_places > 1) copy_bias<kByThreads>(after, at_.stage());
    if (layout_.bias_places == 1) copy_bias<kByThreads>(next, 0);
    if (!is_past(next)) tell<kByThreads>(after, at_.stage());
  }

  /// A panel for each warpgroup that computes.
  template <bool kByThreads>
  __device__ __forceinline__ void copy_bias(const BackwardNote& note, int place) const {
    if (!Config::may_have(kNoteBiased) || layout_.bias_places == 0 || is_past(note)) return;
    const uint32_t s_place = behind_state(layout_.bias + place * layout_.bias_bytes);
    const uint64_t& full = state_.bias_full[place];
    if (!kByThreads || layout_.bias_by_panels) return load_bias_panels(note, s_place, address(full));
    const Sequence sequence = sequence_of(note);
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group)
      load_bias<kGroupThreads, kBlockM, kGroupRows>(s_place + group * (layout_.bias_bytes / kGroups), p_.bias,
                                                    layout_.copies_bias, sequence, note.tile * kBlockM,
                                                    work_.first_key + group * kGroupRows);
    ptx::cp_async_arrive(address(full));
    this->release(full);
  }
  __device__ __forceinline__ void load_bias_panels(const BackwardNote& note, uint32_t s_place, uint32_t s_full) const {
    if (warp_ != kTeller) return;
    if (lane_ == 0) {
      const int head = p_.bias.head_stride ? work_.sequence.head + note.head : 0;
      const int batch = p_.bias.batch_stride ? work_.sequence.batch : 0;
      ptx::mbarrier_arrive_expect(s_full, layout_.bias_bytes);
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        ptx::tma_load(s_place + group * panel_bytes(kBlockM), &bias_map_, s_full, work_.first_key + group * kGroupRows,
                      note.tile * kBlockM, head, batch);
    }
    __syncwarp();
  }

  /// What the warps that compute must know of a step.
  template <bool kByThreads>
  __device__ __forceinline__ void tell(const BackwardNote& note, int stage) const {
    const bool is_masked = Config::template has<kNoteMasked>(note.flags);
    const uint32_t s_words = behind_state(layout_.words + stage * layout_.words_bytes);
    const uint32_t s_full = address(state_.note_full[stage]);
    if (kByThreads && layout_.makes_words && is_masked)
      load_words<kGroupThreads, kBlockM, kBlockN>(s_words, p_, workspace_.visibility, sequence_of(note), note.tile,
                                                  work_.first_key / kBlockN);
    if (warp_ == kTeller && lane_ == 0) state_.notes[stage] = note;
    if (kByThreads && layout_.makes_words) return this->release(state_.note_full[stage]);
    if (warp_ != kTeller) return;
    if (lane_ == 0) {
      if (is_masked) {
        ptx::mbarrier_arrive_expect(s_full, layout_.words_bytes);
        ptx::bulk_load(s_words,
                       workspace_.visibility.words_of(work_.sequence.batch, work_.sequence.head + note.head, note.tile,
                                                      work_.first_key / kBlockN),
                       layout_.words_bytes, s_full);
      } else {
        ptx::mbarrier_arrive(s_full);
      }
    }
    __syncwarp();
  }

  const CUtensorMap& bias_map_;
  const OptionsLayout& layout_;
};

}  // namespace flash_ext::sm90
