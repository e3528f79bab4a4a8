// The steps of a block of which masks leave something, found 32 tiles of queries at a time, a lane each.
#pragma once

#include "options_storage.cuh"

namespace flash_ext::sm90 {

/// For one warp.
template <class Config>
class OptionsSteps {
 public:
  __device__ __forceinline__ OptionsSteps(const BackwardWorkspace& workspace, const OptionsLayout& layout,
                                          const OptionsState<Config>& state, int lane)
      : workspace_(workspace),
        layout_(layout),
        work_(state.work()),
        options_(state.options()),
        lane_(lane),
        window_(work_.first_step()) {
    ask(window_);
    take();
  }

  /// The first one, and whenever it is called again the one after it. Past the last one, kNotePast.
  __device__ __forceinline__ BackwardNote next() {
    while (left_ == 0) {
      if (is_past(window_)) return {0, window_.head, kNotePast, 0.0f};
      window_ = after(window_);
      take();
    }
    const uint32_t tile = left_ & -left_;
    left_ ^= tile;
    BackwardNote note{window_.tile + __ffs(static_cast<int>(tile)) - 1, window_.head, layout_.flags, slope() * kLog2E};
    const bool has_words = !Config::kAny || layout_.words_bytes > 0;
    if (Config::may_have(kNoteMasked) && has_words && (masked_ & tile)) note.flags |= kNoteMasked;
    const bool hides = Config::template has<kNoteMasked>(note.flags) || Config::template has<kNoteBiased>(note.flags) ||
                       Config::template has<kNoteKeyBiased>(note.flags);
    if (work_.is_cleaned(note.tile) || (hides && (unclean_ & tile))) note.flags |= kNoteCleaned;
    return note;
  }

 private:
  /// ALiBi's, of the head of the window. The kernel of all options reads it for each step: it has no register for it.
  __device__ __forceinline__ float slope() const { return Config::kAny ? slope_of_head() : slope_; }
  __device__ __forceinline__ float slope_of_head() const {
    return Config::template has<kNoteSloped>(layout_.flags) ? options_.slopes[window_.head] : 0.0f;
  }
  __device__ __forceinline__ bool is_past(const BackwardStep& window) const { return window.head >= work_.heads; }
  __device__ __forceinline__ BackwardStep after(BackwardStep window) const {
    window.tile += 32;
    if (window.tile < work_.tiles.end) return window;
    return {window.head + 1, work_.tiles.begin};
  }

  /// What memory says of a window's tiles. It is asked while those before it go by: behind the additions to dQ an
  /// answer comes late.
  __device__ __forceinline__ void ask(const BackwardStep& window) {
    const int tile = window.tile + lane_;
    coming_state_ = kTileHidden;
    if (is_past(window) || tile >= work_.tiles.end) return;
    coming_state_ = kTileVisible;
    if (Config::may_have(kNoteMasked | kNoteKeyBiased) && options_.masks) {
      const VisibilityTiles& tiles = workspace_.visibility;
      coming_state_ = tiles.states_of(work_.sequence.batch, work_.sequence.head + window.head,
                                      work_.first_key / Config::kBlockN)[tiles.query_tiles > 1 ? tile : 0];
    }
    if (Config::may_have(kNoteMasked | kNoteBiased | kNoteKeyBiased) && options_.hides)
      coming_unclean_ = workspace_.unclean[work_.workspace_tile + window.head * workspace_.tiles_per_head + tile];
  }
  /// Takes up the window that was asked for last, and asks for the one after it.
  __device__ __forceinline__ void take() {
    left_ = __ballot_sync(~0u, coming_state_ != kTileHidden);
    masked_ = __ballot_sync(~0u, coming_state_ == kTileMasked);
    unclean_ = __ballot_sync(~0u, coming_unclean_ != 0);
    if (is_past(window_)) return;
    if (!Config::kAny) slope_ = slope_of_head();
    ask(after(window_));
  }

  const BackwardWorkspace& workspace_;
  const OptionsLayout& layout_;
  const BackwardWork<Config>& work_;
  const BackwardOptions& options_;
  const int lane_;
  BackwardStep window_;                           // its first tile
  uint32_t left_ = 0, masked_ = 0, unclean_ = 0;  // bits of its tiles
  float slope_ = 0.0f;                            // see slope()
  int coming_state_ = 0, coming_unclean_ = 0;     // of the window after it, of this lane's tile
};

}  // namespace flash_ext::sm90
