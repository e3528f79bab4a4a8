// Loads from shared memory by its own addresses.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t s_address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(s_address) : "memory");
  return half;
}

/// Until what was loaded into `words` of the warp has arrived: an arrival at a barrier waits for no loads under way,
/// but a branch on what they bring does.
__device__ __forceinline__ void wait_for_loaded(uint32_t words) {
  if (__any_sync(~0u, words == 0x7FC17FC1u)) asm volatile("nanosleep.u32 0;" ::: "memory");  // whatever they are
}

}  // namespace flash_ext::ptx
