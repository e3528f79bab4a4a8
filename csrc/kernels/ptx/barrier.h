// Barriers among some warps of a CTA (PTX ISA, "bar"). Barrier 0 is __syncthreads.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Waits until kThreads threads have arrived, this one included.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

/// The same with a barrier that is known only at run time.
template <int kThreads>
__device__ __forceinline__ void barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Arrives as one of the kThreads threads of a barrier, without waiting for the others.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

/// Waits for all kThreads threads, and returns to each of them whether the predicate holds for any.
template <int kThreads>
__device__ __forceinline__ bool barrier_any(int barrier, bool predicate) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.u32 mine, %1, 0;\n"
      "bar.red.or.pred any, %2, %3, mine;\n"
      "selp.u32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(predicate)), "r"(barrier), "n"(kThreads)
      : "memory");
  return any != 0;
}

}  // namespace flash_ext::ptx
