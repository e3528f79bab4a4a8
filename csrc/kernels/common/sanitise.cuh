// Inf and NaN in values that a query does not see. The weight of a hidden pair is 0, and 0 * Inf is NaN. So a partial
// tile is sanitised before it is multiplied: Inf and NaN are replaced. At the end they are added to the rows of out
// that do see them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/tile.cuh"

namespace flash_ext {

template <class Element>
struct NonFinite {
  static constexpr uint32_t kExponent =
      std::is_same_v<Element, __half> ? 0x7C007C00u : (sizeof(Element) == 2 ? 0x7F807F80u : 0x7F800000u);
  static constexpr uint32_t kLowestOfExponent =
      std::is_same_v<Element, __half> ? 0x04000400u : (sizeof(Element) == 2 ? 0x00800080u : 0x00800000u);
  static constexpr uint32_t kSign = sizeof(Element) == 2 ? 0x80008000u : 0x80000000u;
  static constexpr int kMagnitudeBits = sizeof(Element) == 2 ? 15 : 31;  // below the sign
  // 2^60, which is far larger than any product and small enough for sums in float; for float16, its largest number.
  static constexpr uint32_t kLarge =
      std::is_same_v<Element, __half> ? 0x7BFF7BFFu : (sizeof(Element) == 2 ? 0x5D805D80u : 0x5D800000u);

  /// The sign bits of those elements of a word whose exponent is all ones.
  __device__ __forceinline__ static uint32_t in_word(uint32_t word) {
    return ((word & kExponent) + kLowestOfExponent) & kSign;
  }
  /// The word with those elements made 0.
  __device__ __forceinline__ static uint32_t without(uint32_t word) {
    const uint32_t found = in_word(word);
    if constexpr (sizeof(Element) == 4) return found ? 0u : word;
    return word & ~(found ? (found >> 15) * 0xFFFFu : 0u);
  }
  /// The word with NaN made 0, and Inf made a large number. 0 times this number is 0. In a key, it turns a score of
  /// -inf into one so low that its weight is 0 too, except with the smallest queries of float16.
  __device__ __forceinline__ static uint32_t bounded(uint32_t word) {
    const uint32_t found = in_word(word);
    if (!found) return word;
    const uint32_t nan = in_all((word & kMantissa) + kMantissa & kLowestOfExponent, kMantissaBits);
    return (word & ~in_all(found, kMagnitudeBits)) | (in_all(found, kMagnitudeBits) & ~nan & (kLarge | (word & kSign)));
  }

  /// The same for a 16-byte chunk. in_chunk() has each bit that in_word() finds in one of its words.
  __device__ __forceinline__ static uint32_t in_chunk(const uint4& x) {
    return in_word(x.x) | in_word(x.y) | in_word(x.z) | in_word(x.w);
  }
  __device__ __forceinline__ static uint4 without(const uint4& x) {
    return {without(x.x), without(x.y), without(x.z), without(x.w)};
  }
  __device__ __forceinline__ static uint4 bounded(const uint4& x) {
    return {bounded(x.x), bounded(x.y), bounded(x.z), bounded(x.w)};
  }

 private:
  static constexpr uint32_t kMantissa = ~(kExponent | kSign);
  static constexpr int kMantissaBits = std::is_same_v<Element, __half> ? 10 : (sizeof(Element) == 2 ? 7 : 23);

  /// All bits of those elements whose bit number `bit` is set in `bits`. No other bit may be set.
  __device__ __forceinline__ static uint32_t in_all(uint32_t bits, int bit) {
    return (bits >> bit) * (sizeof(Element) == 2 ? 0xFFFFu : ~0u);
  }
};

/// A 16-byte chunk at an address of shared memory.
__device__ __forceinline__ uint4& shared_chunk(uint32_t s_chunk) {
  return *static_cast<uint4*>(__cvta_shared_to_generic(s_chunk));
}

/// Sanitises 16-byte chunks: numbers `first`, first + kStep, ... below kEnd, each a uint4 that chunk(number) gives.
/// Non-finite elements become 0, or with kBounded a large number where they are Inf. True if there were some. Nearly
/// always there are none: the first look is the fast one.
template <class Element, bool kBounded, int kEnd, int kStep, int kUnroll, class Chunk>
__device__ __forceinline__ bool sanitise_chunks(int first, Chunk chunk) {
  using Test = NonFinite<Element>;
  uint32_t found = 0;
#pragma unroll kUnroll
  for (int k = first; k < kEnd; k += kStep) {
    const uint4 x = chunk(k);  // in one load
    found |= Test::in_chunk(x);
  }
  if (!found) return false;
#pragma unroll 1
  for (int k = first; k < kEnd; k += kStep) {
    uint4& target = chunk(k);
    const uint4 x = target;
    target = kBounded ? Test::bounded(x) : Test::without(x);
  }
  return true;
}

/// Sanitises the chunks of a tile in shared memory that this thread itself loaded by load_tile with the same template
/// arguments: its own copies have landed once it waited for them.
template <class Element, int kColumns, int kThreads, int kRows, bool kBounded = false>
__device__ __forceinline__ bool sanitise_loaded_tile(uint32_t s_tile, int thread = static_cast<int>(threadIdx.x)) {
  using Layout = TileLayout<Element, kColumns>;
  const auto chunk = [&](int flat) -> uint4& {
    return shared_chunk(s_tile + Layout::at(flat / Layout::kChunks, flat % Layout::kChunks));
  };
  return sanitise_chunks<Element, kBounded, kRows * Layout::kChunks, kThreads, 4>(thread, chunk);
}

/// Adds the non-finite values of keys [first_key, end_key) to the rows of out, [first_query, end_query), that see them:
/// Inf and NaN come out as from the product, whatever the weight. Slow and rare. By kThreads threads.
template <class Element, int kThreads, class Out, class Values>
__device__ __forceinline__ void add_non_finite(const AttentionParams& p, const Sequence& sequence, const Out& out,
                                               const Values& values, int first_query, int end_query, int first_key,
                                               int end_key, int thread = static_cast<int>(threadIdx.x)) {
  const MaskRows mask(p.mask, sequence);
  const BlockMaskRows blocks(p.blocks, sequence);
#pragma unroll 1
  for (int column = thread; column < p.head_dim_v; column += kThreads) {
#pragma unroll 1
    for (int j = first_key; j < end_key; ++j) {
      const float value = static_cast<float>(values.row(j)[column]);
      if (isfinite(value)) continue;
#pragma unroll 1
      for (int i = first_query; i < end_query; ++i) {
        if (j < sequence.keys_begin(i) || j >= sequence.keys_end(i)) continue;
        if (mask.data && !mask.data[i * mask.row_stride + j * mask.col_stride]) continue;
        if (blocks.offsets && !(blocks.word(i, j & ~31) >> (j & 31) & 1u)) continue;
        Element& element = out.row(i)[column];
        element = static_cast<Element>(static_cast<float>(element) + value);
      }
    }
  }
}

}  // namespace flash_ext
