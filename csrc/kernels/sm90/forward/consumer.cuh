// The loop of a consumer warpgroup over its work tiles, for every traversal of key tiles.
#pragma once

#include "kernels/common/scheduler/work_tile_queue.cuh"
#include "traverse_from_diagonal.cuh"
#include "traverse_listed.cuh"
#include "traverse_range.cuh"
#include "traverse_visible.cuh"

namespace flash_ext::sm90 {

/// A traversal has visit() and add_hidden_non_finite().
template <class Config>
using ForwardTraversal = std::conditional_t<
    Config::kVisible, TraverseVisible<Config>,
    std::conditional_t<Config::kListsBlocks, TraverseListed<Config>,
                       std::conditional_t<Config::kScoreOptions, TraverseFromDiagonal<Config>, TraverseRange<Config>>>>;

template <class Config>
class ForwardConsumer : public ForwardTraversal<Config> {
  using Base = ForwardTraversal<Config>;

 public:
  using Base::Base;
  using typename Base::WorkTile;

  /// Computes the work tiles of the CTA, one after the other. `start` lets the CTA begin (kernel.cuh).
  template <class Start>
  __device__ __forceinline__ void run(Start start) {
    start();
    WorkTileQueue<ForwardStorage<Config>> queue(this->storage_);
    while (WorkTile* const work_tile = queue.front()) {
      this->zero();
      if constexpr (Config::kScoreOptions)  // inline, because a function of its own takes a register
        this->small_scores_ =
            Config::kSoftcapsSmallScores && this->terms_.small_scores.shift < 0.0f && work_tile->slope == 0.0f;
      this->visit(*work_tile);
      if (!work_tile->safe_path) this->find_failures(*work_tile);
      this->store(*work_tile);
      if (work_tile->met_non_finite && !work_tile->partial) this->add_hidden_non_finite(*work_tile);
      queue.pop(this->lane_);
    }
  }
};

}  // namespace flash_ext::sm90
