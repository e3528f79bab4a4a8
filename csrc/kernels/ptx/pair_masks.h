// Operations on both 16-bit numbers of a register at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_ext::ptx {

/// Spreads bits 7 and 23 of x over all 16 bits of their halves (PTX ISA, "prmt": a selector nibble 8 + k is the sign of
/// byte k).
__device__ __forceinline__ uint32_t spread_low_signs(uint32_t x) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, 0xaa88;" : "=r"(y) : "r"(x));
  return y;
}

/// Spreads the sign of a byte of x over the low half, and the sign of the same byte of y over the high half
/// (PTX ISA, "prmt": y has bytes 4 to 7).
__device__ __forceinline__ uint32_t pair_byte_signs(uint32_t x, uint32_t y, int byte) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0xCC88 + byte * 0x1111));
  return z;
}

/// Sets all bits of each half in which the numbers of x and y differ, or one is NaN (PTX ISA, "set").
template <class Element>
__device__ __forceinline__ uint32_t differs(uint32_t x, uint32_t y);

template <>
__device__ __forceinline__ uint32_t differs<__half>(uint32_t x, uint32_t y) {
  uint32_t mask;
  asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}

template <>
__device__ __forceinline__ uint32_t differs<__nv_bfloat16>(uint32_t x, uint32_t y) {
  uint32_t mask;
  asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(x), "r"(y));
  return mask;
}

/// The sums of both pairs.
template <class Element>
__device__ __forceinline__ uint32_t add_pairs(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  const Pair sum = __hadd2(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(y));
  return reinterpret_cast<const uint32_t&>(sum);
}

}  // namespace flash_ext::ptx
