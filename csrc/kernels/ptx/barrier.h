// Barriers among some warps of a block (PTX ISA, "bar"). Barrier 0 is __syncthreads.
#pragma once

namespace flash_ext::ptx {

/// Waits until kThreads threads have arrived, this one included.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

}  // namespace flash_ext::ptx
