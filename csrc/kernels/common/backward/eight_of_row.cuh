// Stores eight neighbouring elements of a row of a result, converted from float.
#pragma once

#include <cstdint>

namespace flash_ext {

/// Stores one of the two rows of accumulators that four lanes hold in x: the first row if `first` is 0, the second if
/// it is 2.
template <class Element>
__device__ __forceinline__ void store_eight_of_row(Element* g_target, const float (&x)[4][4], int first, float factor) {
  constexpr int kElements = 16 / sizeof(Element);
  alignas(16) Element eight[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) eight[k] = static_cast<Element>(x[k / 2][first + k % 2] * factor);
#pragma unroll
  for (int k = 0; k < 8; k += kElements)
    *reinterpret_cast<uint4*>(g_target + k) = *reinterpret_cast<const uint4*>(eight + k);
}

}  // namespace flash_ext
