// Words of two halves or four bytes.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// The lesser of each two halves (PTX ISA, "min"); compute capability 9.0.
__device__ __forceinline__ uint32_t min_u16x2(uint32_t a, uint32_t b) {
  uint32_t least;
  asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
}

/// Bytes of a (0 to 3) and b (4 to 7), each by a digit of the selector, the last one for the lowest byte; with 8 added,
/// the byte's sign eight times (PTX ISA, "prmt").
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "n"(kSelector));
  return bytes;
}

/// 16 bits from shared memory.
__device__ __forceinline__ uint32_t load_shared_16(uint32_t s_address) {
  uint16_t half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(s_address) : "memory");
  return half;
}

}  // namespace flash_ext::ptx
