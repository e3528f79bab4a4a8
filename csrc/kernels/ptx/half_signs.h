// Signs of halves of words, as masks (PTX ISA, "prmt").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// The sign of half kHalf of x in all bits of the low half, that of y in all bits of the high half.
template <int kHalf>
__device__ __forceinline__ uint32_t pair_signs(uint32_t x, uint32_t y) {
  uint32_t z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "n"(0xDD99 + kHalf * 0x2222));
  return z;
}

}  // namespace flash_ext::ptx
