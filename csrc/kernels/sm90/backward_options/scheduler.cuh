// The steps of a CTA that masks leave, found 32 query tiles at a time, one per lane.
#pragma once

#include "kernels/sm90/common/backward/step_window.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Finds the steps in their order, for one warp.
template <class Config>
class BackwardOptionsSteps : BackwardStepWindow<Config> {
 public:
  __device__ __forceinline__ BackwardOptionsSteps(const BackwardWorkspace& workspace,
                                                  const BackwardOptionsLayout& layout,
                                                  const BackwardOptionsStorage<Config>& storage, int lane)
      : Base(workspace, storage.work_tile, lane), layout_(layout), options_(storage.options) {
    ask(window_);
    take();
  }

  /// Returns the next step, at first the first one. Past the last one it returns kStepPast.
  __device__ __forceinline__ StepMetadata next() {
    while (left_ == 0) {
      if (this->is_past(window_)) return {0, window_.head, kStepPast, 0.0f};
      window_ = this->after(window_);
      take();
    }
    const uint32_t bit = this->take_bit();
    StepMetadata metadata{this->tile_of(bit), window_.head, layout_.flags, slope() * kLog2E};
    const bool has_words = !Config::kAny || layout_.words_bytes > 0;
    if (Config::may_have(kStepMasked) && has_words && (masked_ & bit)) metadata.flags |= kStepMasked;
    const bool hides = Config::template has<kStepMasked>(metadata.flags) ||
                       Config::template has<kStepBiased>(metadata.flags) ||
                       Config::template has<kStepKeyBiased>(metadata.flags);
    if (work_tile_.is_sanitised(metadata.tile) || (hides && (has_non_finite_ & bit))) metadata.flags |= kStepSanitised;
    return metadata;
  }

 private:
  using Base = BackwardStepWindow<Config>;
  using Base::has_non_finite_, Base::lane_, Base::left_, Base::masked_, Base::next_state_, Base::window_,
      Base::work_tile_, Base::workspace_;

  /// The ALiBi slope of the window's head. The kernel of all options reads it for each step: it has no register to keep
  /// it.
  __device__ __forceinline__ float slope() const { return Config::kAny ? slope_of_head() : slope_; }
  __device__ __forceinline__ float slope_of_head() const {
    return Config::template has<kStepAlibi>(layout_.flags) ? options_.slopes[window_.head] : 0.0f;
  }

  /// Issues the loads of the states of a window's tiles. It does so while the window before is in use: after the
  /// additions to dQ the states would arrive late.
  __device__ __forceinline__ void ask(const BackwardStep& window) {
    if (!this->begin_asking(window)) return;
    next_state_ = kTileVisible;
    if (Config::may_have(kStepMasked | kStepKeyBiased) && options_.masks)
      next_state_ = workspace_.visibility.state_of(work_tile_.sequence.batch, work_tile_.sequence.head + window.head,
                                                   work_tile_.first_key / Config::kBlockN, window.tile + lane_);
    if (Config::may_have(kStepMasked | kStepBiased | kStepKeyBiased) && options_.hides)
      this->ask_for_non_finite(window);
  }
  /// Takes the answers for the current window, and asks for the window after it.
  __device__ __forceinline__ void take() {
    this->take_answers();
    if (this->is_past(window_)) return;
    if (!Config::kAny) slope_ = slope_of_head();
    ask(this->after(window_));
  }

  const BackwardOptionsLayout& layout_;
  const BackwardOptions& options_;
  float slope_ = 0.0f;  // see slope()
};

}  // namespace flash_ext::sm90
