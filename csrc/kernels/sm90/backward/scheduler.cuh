// The steps of a CTA that a mask of pairs leaves, found 32 query tiles at a time, one per lane.
#pragma once

#include "options_storage.cuh"

namespace flash_ext::sm90 {

/// The steps in their order, for one warp.
template <class Config>
class BackwardStepFinder {
 public:
  __device__ __forceinline__ BackwardStepFinder(const BackwardWorkspace& workspace,
                                                const BackwardWorkTile<Config>& work_tile, int lane)
      : workspace_(workspace), work_tile_(work_tile), lane_(lane), window_(work_tile.first_step()) {
    ask(window_);
    take();
  }

  /// The next step, as BackwardFoundStepsOfCta has it. There must be one.
  __device__ __forceinline__ ListedQueries next() {
    while (left_ == 0) {
      window_ = after(window_);
      take();
    }
    const uint32_t bit = left_ & -left_;
    left_ ^= bit;
    const int tile = window_.tile + __ffs(static_cast<int>(bit)) - 1, head = work_tile_.sequence.head + window_.head;
    return {head, tile, masked_ & bit ? words_of(head, tile) : -1, (has_non_finite_ & bit) != 0};
  }

 private:
  __device__ __forceinline__ int words_of(int head, int tile) const {
    const VisibilityTiles& tiles = workspace_.visibility;
    const int row =
        (tiles.word_batches > 1 ? work_tile_.sequence.batch : 0) * tiles.word_heads + (tiles.word_heads > 1 ? head : 0);
    return (row * tiles.word_query_tiles + (tiles.word_query_tiles > 1 ? tile : 0)) * tiles.key_tiles +
           work_tile_.first_key / Config::kBlockN;
  }
  __device__ __forceinline__ BackwardStep after(BackwardStep window) const {
    window.tile += 32;
    if (window.tile < work_tile_.tiles.end) return window;
    return {window.head + 1, work_tile_.tiles.begin};
  }
  /// Reads the states of a window's tiles, while those of the window before are in use.
  __device__ __forceinline__ void ask(const BackwardStep& window) {
    const int tile = window.tile + lane_;
    next_state_ = kTileHidden;
    if (window.head >= work_tile_.heads || tile >= work_tile_.tiles.end) return;
    next_state_ = state_of(workspace_.visibility, work_tile_, window.head, tile);
    next_has_non_finite_ =
        workspace_.has_non_finite[work_tile_.workspace_tile + window.head * workspace_.tiles_per_head + tile];
  }
  __device__ __forceinline__ void take() {
    left_ = __ballot_sync(~0u, next_state_ != kTileHidden);
    masked_ = __ballot_sync(~0u, next_state_ == kTileMasked);
    has_non_finite_ = __ballot_sync(~0u, next_has_non_finite_ != 0);
    ask(after(window_));
  }

  const BackwardWorkspace& workspace_;
  const BackwardWorkTile<Config>& work_tile_;
  const int lane_;
  BackwardStep window_;                                  // its first tile
  uint32_t left_ = 0, masked_ = 0, has_non_finite_ = 0;  // bits of its tiles
  int next_state_ = 0, next_has_non_finite_ = 0;         // of the window after it, of this lane's tile
};

}  // namespace flash_ext::sm90
