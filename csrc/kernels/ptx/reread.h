// Returns a value that the compiler takes for a new one.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Returns x. Values that depend on the result are computed after this place, and not before a loop that has no
/// registers for them.
template <class T>
__device__ __forceinline__ T reread(T x) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flash_ext::ptx
