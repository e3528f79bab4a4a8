// The loop of a CTA over its query tiles: the next tile, its metadata, and the turns of additions to dQ.
#pragma once

#include "kernels/common/backward/visibility.cuh"
#include "kernels/ptx/flag.h"
#include "warp.cuh"

namespace flash_ext::sm80 {

template <class Config>
struct BackwardWalk : BackwardWarp<Config> {
  using Base = BackwardWarp<Config>;
  using Base::Base;
  using Base::is_partial, Base::lane, Base::tile_index, Base::warp, Base::work_tile, Base::workspace;
  using typename Base::Unit;

  /// The step after `step`, among the query tiles that see some key. After the last step, its head is past the group.
  __device__ __forceinline__ BackwardStep next(BackwardStep step) const {
    if (++step.tile == work_tile.tiles.end) step.tile = work_tile.tiles.begin;
    if (step.tile == work_tile.first_tile) ++step.head;
    return step;
  }

  __device__ __forceinline__ BackwardStep previous(BackwardStep step) const {
    if (step.tile == work_tile.first_tile) --step.head;
    if (step.tile == work_tile.tiles.begin) step.tile = work_tile.tiles.end;
    --step.tile;
    return step;
  }

  __device__ __forceinline__ bool is_past(const BackwardStep& step) const { return step.head >= work_tile.heads; }

  /// Whether one of the flags is set. Without options flags are not looked up, but computed.
  __device__ __forceinline__ bool has(const PreparedStep& now, int flags) const {
    if constexpr (Config::kHasOptions) {
      return (now.flags & flags) != 0;
    } else {
      return (flags & kStepPast && is_past(now.step)) || (flags & kStepPartial && is_partial(now.step));
    }
  }

  __device__ __forceinline__ PreparedStep prepare(const BackwardStep& step) const {
    PreparedStep prepared{step, 0, 0.0f};
    if constexpr (Config::kHasOptions) {
      const BackwardOptions& options = work_tile.options;
      if (is_past(step)) return {step, kStepPast, 0.0f};
      if (options.slopes) prepared.slope = options.slopes[step.head] * Unit::kPerNatural;
      if (is_partial(step)) prepared.flags |= kStepPartial;
      if (options.biased) prepared.flags |= kStepMayHide;
      if (options.masks) {
        const int state = workspace.visibility.state_of(work_tile.sequence.batch, work_tile.sequence.head + step.head,
                                                        work_tile.key_tile, step.tile);
        if (state == kTileHidden) prepared.flags |= kStepHidden;
        if (state == kTileMasked) prepared.flags |= kStepMasked | kStepMayHide;
      }
      if (options.hides && workspace.has_non_finite[tile_index(step)]) prepared.flags |= kStepNonFinite;
    }
    return prepared;
  }
  /// Puts into the ring, as number n, `step` or the first step after it of which the masks leave something.
  __device__ __forceinline__ void put_step(const BackwardStep& step, int n) const {
    PreparedStep prepared = prepare(step);
    while (prepared.flags & kStepHidden) prepared = prepare(next(prepared.step));
    if (lane == 0) work_tile.ring[n % 8] = prepared;
    __syncwarp();
  }
  __device__ __forceinline__ bool prepares() const { return Config::kHasOptions && warp == Config::kRoleWarps; }

  /// Takes and ends the turns of the steps from `step` up to `end`, which masks hide, so that no CTA waits for their
  /// additions.
  __device__ __forceinline__ void skip_turns(BackwardStep step, const BackwardStep& end) const {
    for (; step.head != end.head || step.tile != end.tile; step = next(step)) {
      wait_for_turn(step);
      end_turn(step);
    }
  }
  __device__ __forceinline__ void skip_turns_before(int n) const {
    if constexpr (Config::kHasOptions) {
      if (workspace.turns && work_tile.options.masks)
        skip_turns(n == 0 ? work_tile.first_step() : next(work_tile.ring[(n - 1) % 8].step),
                   work_tile.ring[n % 8].step);
    }
  }

  __device__ __forceinline__ int32_t* turn_of(const BackwardStep& step) const {
    return workspace.turns + tile_index(step) * kDqWarps + warp;
  }
  __device__ __forceinline__ void wait_for_turn(const BackwardStep& step) const {
    const int turn = work_tile.turn(step.tile);
    if (lane == 0) {
      // `<` instead of `!=`: lengths that make no sense may count past it, and must not hang.
      while (ptx::load_acquire(turn_of(step)) < turn) __nanosleep(20);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void end_turn(const BackwardStep& step) const {
    __threadfence();
    __syncwarp();
    if (lane == 0) ptx::add_release(turn_of(step), 1);
  }
};

}  // namespace flash_ext::sm80
