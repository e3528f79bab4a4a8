// Loads from shared memory by its own addresses.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t load_shared_16(uint32_t s_address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(s_address) : "memory");
  return half;
}

}  // namespace flash_ext::ptx
