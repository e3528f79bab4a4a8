// Counters in global memory by which CTAs wait for each other (PTX ISA, "ld", "red").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Loads a counter. What was written before the counter was raised to this value is visible afterwards.
__device__ __forceinline__ int32_t load_acquire(const int32_t* g_counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_counter) : "memory");
  return value;
}

/// Loads a counter. Other memory is ordered only by a fence that follows.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* g_counter) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_counter) : "memory");
  return value;
}

/// After a relaxed load it makes the load an acquire; before a relaxed addition it makes the addition a release.
__device__ __forceinline__ void fence_acquire_release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void add_relaxed(int32_t* g_counter, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(g_counter), "r"(x) : "memory");
}

/// Adds to a counter, and so publishes what this thread, and threads that it synchronised with, wrote before.
__device__ __forceinline__ void add_release(int32_t* g_counter, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(g_counter), "r"(x) : "memory");
}

}  // namespace flash_ext::ptx
