// The warpgroup that loads tiles and computes dQ where a mask of pairs hides whole tiles. It finds the steps that are
// left, 32 query tiles at a time, one per lane.
#pragma once

#include "pipelined_options.cuh"
#include "pipelined_producer_dq.cuh"

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

/// One warp of it.
template <class Config>
class BackwardMasksDq : BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>> {
  using Base = BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>>;
  using Base::lane_;
  using Base::storage_;
  using Base::warp_;
  using Base::work_tile_;
  using Base::workspace_;
  using typename Base::LoadedStep;
  using typename Base::LoadedTile;
  using typename Base::Place;
  using typename Base::Steps;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    if (work_tile_.tiles.begin < work_tile_.tiles.end) load_and_add();
    if (lane_ == 0) ptx::tma_store_wait();
  }

 private:
  friend Base;

  /// The step whose Q and dO are loaded next.
  struct Next {
    Steps step;
    BackwardStepFinder<Config> finder;
  };

  __device__ __forceinline__ void load_and_add() {
    Steps step(storage_);
    Next next{step, BackwardStepFinder<Config>(workspace_, work_tile_, lane_)};
    this->load_keys_and_values();
#pragma unroll 1
    for (int stage = 0; stage + 1 < Config::kStages; ++stage) load(next);
    this->add_all(*this, step, next);
  }

  __device__ __forceinline__ Place place(const Steps& step) const {
    const ListedQueries queries = storage_.step_metadata[step.slot];
    return {ptx::uniform(queries.head), ptx::uniform(queries.tile)};
  }

  __device__ __forceinline__ void load(Next& next) const {
    if (warp_ > 1 || next.step.is_past_end()) return;
    const ListedQueries found = next.finder.next();
    const LoadedStep step = {{found.head, found.tile}, next.step.stage};
    const LoadedTile tile{step, this->first_term(step)};
    if (warp_ == 0) {
      if (lane_ == 0) storage_.step_metadata[next.step.slot] = found;
      this->load_queries(tile);
    } else {
      this->load_grads(tile);
    }
    next.step.advance();
  }
};

}  // namespace flash_ext::sm90
