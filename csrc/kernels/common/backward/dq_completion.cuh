// How the kernel that stores dQ learns that the sums of a key head are complete. Then it need not wait for the whole
// main kernel: its CTAs start on SMs that have no key tile left, and store dQ of complete heads while the last key
// tiles are still being computed.
//
// Where completion.is_used(), each warp of the dQ warpgroup increments the counter of its key head once for a key tile:
// when all that it adds, if anything, is in memory, and all sums of the head have been zeroed (dq_zeroing.cuh).
//
// The kernel of row terms zeroes these counters. The kernel that stores dQ must not read them before that: the main
// kernel lets it start (ptx::launch_dependents) only after it has waited for row terms itself. CUDA promises no more
// than this order, but what the kernel of row terms wrote is in L2 by then, where load_acquire() reads. There is no
// deadlock: when the kernel that stores dQ starts, each CTA of the main kernel has an SM or has ended.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/flag.h"
#include "workspace.h"

namespace flash_ext {

struct DqCompletion {
  /// Whether the kernel that stores dQ waits for heads. Before Hopper no kernel counts, and there are no bulk
  /// reductions.
  __device__ __forceinline__ static bool is_awaited(const BackwardWorkspace& workspace) {
#if __CUDA_ARCH__ >= 900
    return workspace.completion.is_used();
#else
    return false;
#endif
  }
  /// Says that this warp has added all that it adds to the sums of `sequence` for a key tile: lane 0 by bulk
  /// reductions, or each lane by reductions of its own.
  __device__ __forceinline__ static void finish_warp(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                     const Sequence& sequence, int lane) {
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_wait();
      ptx::fence_proxy_async_global();  // what bulk reductions wrote comes before the count
      ptx::add_release(counter(p, workspace, sequence), 1);
    }
    __syncwarp();
  }
  /// Waits until the sums of `sequence` are complete. Each thread that reads them calls it.
  __device__ __forceinline__ static void wait(const BackwardParams& p, const BackwardWorkspace& workspace,
                                              const Sequence& sequence) {
    const int32_t* const g_counter = counter(p, workspace, sequence);
    while (ptx::load_acquire(g_counter) < workspace.completion.warps_of_head) continue;
    ptx::fence_proxy_async_global();  // bulk reductions and the loads that follow reach memory another way
  }

 private:
  __device__ __forceinline__ static int32_t* counter(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                     const Sequence& sequence) {
    return workspace.completion.finished_warps + key_head_of_all(p.heads_kv, sequence.batch, sequence.head_kv);
  }
};

}  // namespace flash_ext
