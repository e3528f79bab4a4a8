// Loads from shared memory by addresses of shared memory.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t s_address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(s_address) : "memory");
  return half;
}

/// Waits until loads into `words` of the warp have arrived. An arrival at a barrier does not wait for loads in flight,
/// so others could overwrite shared memory before it is read. Only a branch on the loaded words keeps the arrival after
/// the loads. The constant is arbitrary: only the dependence on the words matters.
__device__ __forceinline__ void wait_for_loaded(uint32_t words) {
  if (__any_sync(~0u, words == 0x7FC17FC1u)) asm volatile("nanosleep.u32 0;" ::: "memory");
}

}  // namespace flash_ext::ptx
