// A value that the compiler takes for a new one.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// x. What is computed from it is computed where it stands, and not before a loop in registers that the loop lacks.
template <class T>
__device__ __forceinline__ T reread(T x) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash_ext::ptx
