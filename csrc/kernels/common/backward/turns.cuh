// Additions to dQ in an order that is the same in every run: CTAs of Hopper's kernels take turns.
//
// The key tiles that a query tile sees add to its dQ in their order, first keys first. Each warp that adds has a
// counter of the additions that are complete. CTAs take numbers: one when they start, a persistent CTA another one
// before the end of each key tile. They compute the key tiles of these numbers, in this order. So some CTA is always at
// work on the unfinished key tile with the lowest number, and that one waits for nobody: there is no deadlock.
//
// A CTA visits query tiles from the last one that sees its keys down to the first. Without a left window all CTAs of a
// head begin with the same query tile. So each CTA follows the CTA before it at the distance that an addition takes,
// and hardly waits.
#pragma once

#include <cstdint>

#include "kernels/ptx/bulk.h"
#include "kernels/ptx/flag.h"
#include "kernels/ptx/grid_dependency.h"
#include "workspace.h"

namespace flash_ext {

/// Whether the CTAs of a kernel add to dQ in turns. kIfAsked: where the workspace has counters for that.
enum class TurnTaking { kNever, kIfAsked, kAlways };

/// The number of a CTA among the CTAs that have started. One thread takes it. The kernel of row terms has set the
/// ticket to 0.
__device__ __forceinline__ uint32_t take_number(const BackwardWorkspace& workspace) {
  ptx::wait_for_previous_grid();
  return static_cast<uint32_t>(atomicAdd(workspace.ticket, 1));
}

/// The query tiles that a CTA visits, from `first` on; `past` is after the last one. Heads come one after the other.
/// Where additions take turns, a CTA visits a query tile of all heads before the next tile: head by head, a CTA with
/// few tiles would wait in every head for one with many.
struct QueryTileOrder {
  int first, past, stride;

  __device__ __forceinline__ QueryTileOrder(int begin, int end, bool takes_turns)
      : first(takes_turns ? end - 1 : begin), past(takes_turns ? begin - 1 : end), stride(takes_turns ? -1 : 1) {}

  __device__ __forceinline__ bool takes_turns() const { return stride < 0; }
};

/// How a warp adds to dQ. kBulk: the warp waits for its bulk stores and reductions (ptx::bulk_wait). L2, which all SMs
/// share, has then carried them out, so additions of later turns come after them. PTX also asks for fence.acq_rel.gpu,
/// which is slow: it waits for all accesses on their way to L2. GPUs of compute capability 9.0 give the same order
/// without it. kOfRegisters: no other instruction waits for reductions of registers, so they keep the fence, one for
/// two turns.
enum class DqAdditions { kBulk, kOfRegisters };

/// The turns of a warp, one after the other. advance() publishes the additions made so far, with a fence those of two
/// turns at once, and reads whether the warp's next turn has come; wait() waits until it has. Called while a product
/// runs, advance() hides the time that both take. Whole warps call these functions: ptxas must see that their lanes
/// take the same branches, or it separates the lanes around every product of the loop.
template <DqAdditions kAdditions>
class DqTurns {
 public:
  /// Publishes the last additions, or postpones that, and reads whether the next one may begin. `counters`: those of
  /// the workspace; `slot`: the index of one of them.
  __device__ __forceinline__ void advance(int32_t* counters, int slot, int turn, int lane) {
    const bool postpones = kFences && slot_ >= 0 && postponed_slot_ < 0;
    // Without publish()'s fence the load itself must acquire.
    const int32_t count = postpones ? count_of(counters + slot) : ptx::load_relaxed(counters + slot);
    if (postpones) {
      postponed_slot_ = slot_;
    } else {
      publish(counters, lane);
    }
    slot_ = slot;
    has_come_ = __all_sync(~0u, count >= turn);
  }
  /// Waits until `turn` additions have been counted, and are in memory.
  __device__ __forceinline__ void wait(const int32_t* counters, int turn) const {
    // `<` instead of `!=`: lengths that make no sense may count past `turn`, and must not hang.
    if (!has_come_)
      while (__any_sync(~0u, count_of(counters + slot_) < turn)) continue;
    ptx::fence_proxy_async_global();
  }
  /// Counts a turn without an addition and returns true, if the turn has come. Called by one lane.
  __device__ __forceinline__ static bool skip(int32_t* counters, int slot, int turn) {
    if (count_of(counters + slot) < turn) return false;
    if (kFences) ptx::fence_acquire_release();
    ptx::add_relaxed(counters + slot, 1);
    return true;
  }
  /// Publishes the last additions, if any.
  __device__ __forceinline__ void end(int32_t* counters, int lane) {
    publish(counters, lane);
    slot_ = -1;
  }

 private:
  static constexpr bool kFences = kAdditions == DqAdditions::kOfRegisters;

  __device__ __forceinline__ static int32_t count_of(const int32_t* counter) {
    return kFences ? ptx::load_acquire(counter) : ptx::load_relaxed(counter);
  }
  /// One fence releases the additions and acquires the count that has been read.
  __device__ __forceinline__ void publish(int32_t* counters, int lane) {
    if (!kFences) ptx::bulk_wait();
    __syncwarp();
    if (kFences) ptx::fence_acquire_release();
    if (kFences && postponed_slot_ >= 0 && lane == 0) ptx::add_relaxed(counters + postponed_slot_, 1);
    if (slot_ >= 0 && lane == 0) ptx::add_relaxed(counters + slot_, 1);
    postponed_slot_ = -1;
  }

  int slot_ = -1;            // of the latest turn, which has not been published
  int postponed_slot_ = -1;  // of the turn before it, if that has not been published either
  bool has_come_ = false;
};

}  // namespace flash_ext
