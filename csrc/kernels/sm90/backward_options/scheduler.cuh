// The steps of a CTA of which masks leave something, found 32 tiles of queries at a time, a lane each.
#pragma once

#include "storage.cuh"

namespace flash_ext::sm90 {

/// For one warp.
template <class Config>
class BackwardOptionsSteps {
 public:
  __device__ __forceinline__ BackwardOptionsSteps(const BackwardWorkspace& workspace,
                                                  const BackwardOptionsLayout& layout,
                                                  const BackwardOptionsStorage<Config>& storage, int lane)
      : workspace_(workspace),
        layout_(layout),
        work_tile_(storage.work_tile),
        options_(storage.options),
        lane_(lane),
        window_(work_tile_.first_step()) {
    ask(window_);
    take();
  }

  /// The first one, and whenever it is called again the one after it. Past the last one, kStepPast.
  __device__ __forceinline__ StepMetadata next() {
    while (left_ == 0) {
      if (is_past(window_)) return {0, window_.head, kStepPast, 0.0f};
      window_ = after(window_);
      take();
    }
    const uint32_t tile = left_ & -left_;
    left_ ^= tile;
    StepMetadata metadata{window_.tile + __ffs(static_cast<int>(tile)) - 1, window_.head, layout_.flags,
                          slope() * kLog2E};
    const bool has_words = !Config::kAny || layout_.words_bytes > 0;
    if (Config::may_have(kStepIsMasked) && has_words && (masked_ & tile)) metadata.flags |= kStepIsMasked;
    const bool hides = Config::template has<kStepIsMasked>(metadata.flags) ||
                       Config::template has<kStepBiased>(metadata.flags) ||
                       Config::template has<kStepKeyBiased>(metadata.flags);
    if (work_tile_.is_sanitised(metadata.tile) || (hides && (has_non_finite_ & tile))) metadata.flags |= kStepSanitised;
    return metadata;
  }

 private:
  /// ALiBi's, of the head of the window. The kernel of all options reads it for each step: it has no register for it.
  __device__ __forceinline__ float slope() const { return Config::kAny ? slope_of_head() : slope_; }
  __device__ __forceinline__ float slope_of_head() const {
    return Config::template has<kStepAlibi>(layout_.flags) ? options_.slopes[window_.head] : 0.0f;
  }
  __device__ __forceinline__ bool is_past(const BackwardStep& window) const { return window.head >= work_tile_.heads; }
  __device__ __forceinline__ BackwardStep after(BackwardStep window) const {
    window.tile += 32;
    if (window.tile < work_tile_.tiles.end) return window;
    return {window.head + 1, work_tile_.tiles.begin};
  }

  /// What memory says of a window's tiles. It is asked while those before it go by: behind the additions to dQ an
  /// answer comes late.
  __device__ __forceinline__ void ask(const BackwardStep& window) {
    const int tile = window.tile + lane_;
    next_state_ = kTileHidden;
    if (is_past(window) || tile >= work_tile_.tiles.end) return;
    next_state_ = kTileVisible;
    if (Config::may_have(kStepIsMasked | kStepKeyBiased) && options_.masks)
      next_state_ = workspace_.visibility.state_of(work_tile_.sequence.batch, work_tile_.sequence.head + window.head,
                                                   work_tile_.first_key / Config::kBlockN, tile);
    if (Config::may_have(kStepIsMasked | kStepBiased | kStepKeyBiased) && options_.hides)
      next_has_non_finite_ =
          workspace_.has_non_finite[work_tile_.workspace_tile + window.head * workspace_.tiles_per_head + tile];
  }
  /// Acquires the window that was asked for last, and asks for the one after it.
  __device__ __forceinline__ void take() {
    left_ = __ballot_sync(~0u, next_state_ != kTileHidden);
    masked_ = __ballot_sync(~0u, next_state_ == kTileMasked);
    has_non_finite_ = __ballot_sync(~0u, next_has_non_finite_ != 0);
    if (is_past(window_)) return;
    if (!Config::kAny) slope_ = slope_of_head();
    ask(after(window_));
  }

  const BackwardWorkspace& workspace_;
  const BackwardOptionsLayout& layout_;
  const BackwardWorkTile<Config>& work_tile_;
  const BackwardOptions& options_;
  const int lane_;
  BackwardStep window_;                                  // its first tile
  uint32_t left_ = 0, masked_ = 0, has_non_finite_ = 0;  // bits of its tiles
  float slope_ = 0.0f;                                   // see slope()
  int next_state_ = 0, next_has_non_finite_ = 0;         // of the window after it, of this lane's tile
};

}  // namespace flash_ext::sm90
