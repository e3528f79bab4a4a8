// Visible pairs as bits. A word holds one query's bits for 32 keys, in one of two orders: in the order of the keys, in
// which masks are read, or in an order of accumulators (QuadOrder), which main loops test faster. Where scores have
// keys as rows, a word holds one key's bits for the queries of a lane (TransposedOrder).
//
// An accumulator: number n of the 8 keys, t = lane % 4, and c, the second of the lane's two keys: key 8 n + 2 t + c.
#pragma once

#include <cstdint>

#include "kernels/ptx/arithmetic.h"

namespace flash_ext {

/// Packs the kBits lowest bits of each byte of a word together. No other bits may be set.
template <int kBits>
__device__ __forceinline__ uint32_t gather_bytes(uint32_t bytes) {
  // A product that shifts byte k to bit 24 + kBits k; what else it makes stays below bit 24 or leaves the word.
  constexpr uint32_t kShifts = 1u << 24 | 1u << (16 + kBits) | 1u << (8 + 2 * kBits) | 1u << 3 * kBits;
  return bytes * kShifts >> 24 & ((1u << 4 * kBits) - 1);
}

/// Packs 16 keys of a boolean mask, bytes of 0 and 1, into bits.
__device__ __forceinline__ uint32_t bits_of_bytes(const uint4& bytes) {
  return gather_bytes<1>(bytes.x) | gather_bytes<1>(bytes.y) << 4 | gather_bytes<1>(bytes.z) << 8 |
         gather_bytes<1>(bytes.w) << 12;
}

/// Bit k is key k.
struct KeyOrder {
  /// Whether the key of an accumulator is visible.
  __device__ __forceinline__ static bool sees(uint32_t word, int n, int c, int lane) {
    return word >> (8 * n + 2 * (lane % 4) + c) & 1u;
  }
};

/// Each of the four lanes of a row has a part of its own: a byte with the bits of its keys, bit 2 n + c. Where a row
/// has several words, the parts of a lane follow each other.
struct QuadOrder {
  /// The part of lane t, from a word in the order of the keys.
  __device__ __forceinline__ static uint32_t part(uint32_t word, int t) {
    return gather_bytes<2>(word >> 2 * t & 0x03030303u);
  }
  __device__ __forceinline__ static bool sees(uint32_t part, int n, int c) { return part >> (2 * n + c) & 1u; }
};

/// A lane's bits of a key, where scores have keys as rows: bit 15 - n + 16 c is query 8 n + 2 t + c. Shifted left by n,
/// the signs of both halves of the word are those of the pair n of an operand.
struct TransposedOrder {
  __device__ __forceinline__ static constexpr int bit(int n, int c) { return 15 - n + 16 * c; }
  /// The bits of the queries [begin, end), counted from the lane's first.
  __device__ __forceinline__ static uint32_t between(int begin, int end) {
    return of_first(begin, end) | of_first(begin - 1, end - 1) << 16;
  }
  /// 0xFFFF in each half whose pair is visible.
  __device__ __forceinline__ static uint32_t mask_of_pair(uint32_t word, int n) { return ptx::spread_signs(word << n); }

 private:
  /// Bits 15 - n of those n with begin <= 8 n < end.
  __device__ __forceinline__ static uint32_t of_first(int begin, int end) {
    const int first = min(max((begin + 7) >> 3, 0), 16), past = min(max((end + 7) >> 3, 0), 16);
    return ptx::bit_field(16 - past, max(past - first, 0));
  }
};

}  // namespace flash_ext
