// Loads from shared memory by addresses of shared memory.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t s_address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(s_address) : "memory");
  return half;
}

/// Waits until loads into `words` of the warp have arrived: an arrival at a barrier does not wait for loads in flight,
/// but a branch on the loaded values does.
__device__ __forceinline__ void wait_for_loaded(uint32_t words) {
  if (__any_sync(~0u, words == 0x7FC17FC1u)) asm volatile("nanosleep.u32 0;" ::: "memory");  // any values will do
}

}  // namespace flash_ext::ptx
