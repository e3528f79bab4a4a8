// Division by a number that the host knows, as a multiplication and a shift (Granlund and Montgomery, 1994). Kernels
// would otherwise begin with a series of slow divisions.
#pragma once

#include <cstdint>

namespace flash_ext {

/// For dividends below 2^31.
struct Divisor {
  uint32_t value, multiplier, shift;

  explicit Divisor(int64_t divisor) : value(static_cast<uint32_t>(divisor)), multiplier(1), shift(0) {
    while ((uint64_t{1} << shift) < value) ++shift;
    if (value > 0) multiplier += static_cast<uint32_t>((((uint64_t{1} << shift) - value) << 32) / value);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

/// For dividends below 2^63.
struct LongDivisor {
  uint64_t value, multiplier = 1;
  uint32_t shift = 0;

  explicit LongDivisor(int64_t divisor) : value(static_cast<uint64_t>(divisor)) {
    using Twice = unsigned __int128;
    while ((uint64_t{1} << shift) < value) ++shift;
    if (value > 0)
      multiplier += static_cast<uint64_t>((static_cast<Twice>((uint64_t{1} << shift) - value) << 64) / value);
  }

  __device__ __forceinline__ uint64_t quotient(uint64_t n) const { return (__umul64hi(n, multiplier) + n) >> shift; }
};

}  // namespace flash_ext
