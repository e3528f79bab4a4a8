// Counters in global memory by which CTAs wait for each other (PTX ISA, "ld", "red").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// What was written before the counter was raised to this value is visible afterwards.
__device__ __forceinline__ int32_t load_acquire(const int32_t* g_counter) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_counter) : "memory");
  return value;
}

/// Says nothing of other memory before a fence.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* g_counter) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(g_counter) : "memory");
  return value;
}

/// Behind a relaxed load and before a relaxed addition it makes an acquire of one and a release of the other.
__device__ __forceinline__ void fence_acquire_release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void add_relaxed(int32_t* g_counter, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(g_counter), "r"(x) : "memory");
}

/// Publishes what this thread, and those it synchronised with, wrote before.
__device__ __forceinline__ void add_release(int32_t* g_counter, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(g_counter), "r"(x) : "memory");
}

}  // namespace flash_ext::ptx
