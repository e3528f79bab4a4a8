// How the kernel that stores dQ learns that the sums of a key head are complete. Then it need not wait for the whole
// main kernel: its CTAs start on SMs that have no key tile left, and store dQ of heads that are over while the last key
// tiles are still being computed.
//
// Each warp that adds to dQ counts itself among the finished warps of its key head when what it adds to it is in
// memory. The kernel of row terms zeroes these counters. The kernel that stores dQ must not read them before that: the
// main kernel lets it start (ptx::launch_dependents) only after it has waited for row terms itself. Nobody waits for
// ever: when that kernel starts, each CTA of the main kernel has an SM or is over.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/flag.h"
#include "workspace.h"

namespace flash_ext {

struct DqCompletion {
  /// Says that this warp has added all that it adds to the sums of `sequence` for a key tile: its first lane by bulk
  /// reductions, or all lanes by their own.
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
    while (ptx::load_acquire(g_counter) < workspace.completion.all_warps) continue;
    ptx::fence_proxy_async_global();  // the sums were added another way than they are read
  }

 private:
  __device__ __forceinline__ static int32_t* counter(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                     const Sequence& sequence) {
    return workspace.completion.finished_warps + key_head_of_all(p, sequence.batch, sequence.head_kv);
  }
};

}  // namespace flash_ext
