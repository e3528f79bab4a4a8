// The steps of a CTA that has options: those that its masks leave. The warps of the producer warpgroup find them; the
// consumers read them in shared memory, where they come with Q.
#pragma once

#include "kernels/common/backward/visibility.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Finds the steps in their order, for one warp: 32 query tiles of a head at a time, one per lane. Registers are short,
/// so the states of tiles are asked for when they are needed, which is two steps before dQ of the first one.
template <class Config>
class BackwardWideSteps {
 public:
  __device__ __forceinline__ BackwardWideSteps(const BackwardWorkspace& workspace,
                                               const BackwardWideStorage<Config>& storage, int lane)
      : workspace_(workspace), storage_(storage), lane_(lane), first_(storage.work_tile.first_step()) {
    look();
  }

  /// Returns the next step, at first the first one. Past the last one, its head is past the group.
  __device__ __forceinline__ BackwardStep next() {
    while (left_ == 0) {
      if (is_past(first_)) return first_;
      first_.tile += 32;
      if (first_.tile >= work_tile().tiles.end) first_ = {first_.head + 1, work_tile().tiles.begin};
      look();
    }
    const uint32_t bit = left_ & -left_;
    left_ ^= bit;
    return {first_.head, first_.tile + __ffs(static_cast<int>(bit)) - 1};
  }
  __device__ __forceinline__ bool is_past(const BackwardStep& step) const { return step.head >= work_tile().heads; }

  /// What the consumers must know of a step that is not past the last one.
  __device__ __forceinline__ BackwardWideStep describe(const BackwardStep& step) const {
    const BackwardOptions& options = storage_.options;
    const bool has_non_finite =
        options.hides &&
        workspace_.has_non_finite[work_tile().workspace_tile + step.head * workspace_.tiles_per_head + step.tile] != 0;
    return {step, options.masks && state_of(step) == kTileMasked,
            work_tile().is_sanitised(step.tile) || has_non_finite};
  }

 private:
  __device__ __forceinline__ const BackwardWorkTile<Config>& work_tile() const { return storage_.work_tile; }
  __device__ __forceinline__ int state_of(const BackwardStep& step) const {
    const Sequence& sequence = work_tile().sequence;
    return workspace_.visibility.state_of(sequence.batch, sequence.head + step.head,
                                          work_tile().first_key / Config::kBlockN, step.tile);
  }
  /// Finds which of the tiles from first_ on have steps.
  __device__ __forceinline__ void look() {
    const BackwardStep step = {first_.head, first_.tile + lane_};
    bool is_left = !is_past(step) && step.tile < work_tile().tiles.end;
    if (is_left && storage_.options.masks) is_left = state_of(step) != kTileHidden;
    left_ = __ballot_sync(~0u, is_left);
  }

  const BackwardWorkspace& workspace_;
  const BackwardWideStorage<Config>& storage_;
  const int lane_;
  BackwardStep first_;  // the first of the 32 tiles
  uint32_t left_;       // bits of those whose steps are to come
};

}  // namespace flash_ext::sm90
