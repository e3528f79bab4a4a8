// The steps of a CTA that has options: those that its masks leave. The warps of the producer warpgroup find them; the
// consumers read them in shared memory, where they come with Q.
#pragma once

#include "kernels/common/backward/visibility.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Finds the steps in their order, for one warp: 32 query tiles of a head at a time, one per lane. It is no
/// BackwardStepChunk: that loads the next tiles' states early, and here no registers are left to keep them.
template <class Config>
class BackwardWideSteps {
 public:
  __device__ __forceinline__ BackwardWideSteps(const BackwardParams& p, const BackwardWorkspace& workspace,
                                               const BackwardWorkTile<Config>& work_tile, int lane)
      : p_(p), workspace_(workspace), work_tile_(work_tile), lane_(lane), first_(work_tile.first_step()) {
    find_left();
  }

  /// Returns the next step, at first the first one. Past the last one, its head is past the group.
  __device__ __forceinline__ BackwardStep next() {
    while (left_ == 0) {
      if (is_past(first_)) return first_;
      first_.tile += 32;
      if (first_.tile >= work_tile_.tiles.end) first_ = {first_.head + 1, work_tile_.tiles.begin};
      find_left();
    }
    const uint32_t bit = left_ & -left_;
    left_ ^= bit;
    return {first_.head, first_.tile + __ffs(static_cast<int>(bit)) - 1};
  }
  __device__ __forceinline__ bool is_past(const BackwardStep& step) const { return step.head >= work_tile_.heads; }

  /// What the consumers must know of a step.
  __device__ __forceinline__ BackwardWideStep describe(const BackwardStep& step) const {
    if (is_past(step)) return {step, false, false};
    const int64_t tile = work_tile_.workspace_tile + step.head * workspace_.tiles_per_head + step.tile;
    const bool has_non_finite = hides_pairs(p_) && workspace_.has_non_finite[tile] != 0;
    return {step, has_masks() && state_of(step) == kTileMasked, work_tile_.is_sanitised(step.tile) || has_non_finite};
  }

 private:
  __device__ __forceinline__ bool has_masks() const { return p_.mask.data || p_.blocks.offsets; }
  __device__ __forceinline__ int state_of(const BackwardStep& step) const {
    const Sequence& sequence = work_tile_.sequence;
    return workspace_.visibility.state_of(sequence.batch, sequence.head + step.head,
                                          work_tile_.first_key / Config::kBlockN, step.tile);
  }
  /// Finds which of the tiles from first_ on have steps.
  __device__ __forceinline__ void find_left() {
    const BackwardStep step = {first_.head, first_.tile + lane_};
    bool is_left = !is_past(step) && step.tile < work_tile_.tiles.end;
    if (is_left && has_masks()) is_left = state_of(step) != kTileHidden;
    left_ = __ballot_sync(~0u, is_left);
  }

  const BackwardParams& p_;
  const BackwardWorkspace& workspace_;
  const BackwardWorkTile<Config>& work_tile_;
  const int lane_;
  BackwardStep first_;  // the first of the 32 tiles
  uint32_t left_;       // bits of those whose steps are to come
};

}  // namespace flash_ext::sm90
