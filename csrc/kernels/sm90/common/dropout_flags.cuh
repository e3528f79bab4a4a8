// What dropout does to packed weights. The draws are those of common/dropout/random_bits.cuh: in the forward, the warp
// that loads K brings what belongs to the keys; in the backward the calls of a step share it.
#pragma once

#include "kernels/common/dropout/random_bits.cuh"
#include "kernels/ptx/pair_masks.h"

namespace flash_ext::sm90 {

/// Signs of the halves of a word: whether they are below a threshold, whose negative stands in both halves of
/// `minus_threshold`. kDropsMost: it is above half of the range. What lies in the other half is brought to half first,
/// or the difference would not fit.
template <bool kDropsMost>
__device__ __forceinline__ uint32_t below_threshold(uint32_t word, uint32_t minus_threshold) {
  constexpr uint32_t kHalf = 0x80008000u;
  const uint32_t near = kDropsMost ? __viaddmax_u16x2(word, 0, kHalf) : __viaddmin_u16x2(word, 0, kHalf);
  return __viaddmax_s16x2(near, minus_threshold, kHalf);
}

/// A threshold for which two instructions make a word of flags.
struct DropLimit {
  uint32_t most = 0, added = 0;  // the same in both halves

  DropLimit() = default;
  /// For all thresholds up to 2^16, at which nothing is kept.
  explicit DropLimit(uint32_t threshold) {
    const bool drops_all = threshold > 0xFFFFu;
    most = drops_all ? 0u : threshold * 0x10001u;
    added = drops_all ? 0x10001u : ((0x10000u - threshold) & 0xFFFFu) * 0x10001u;
  }

  /// 1 in each half of a word that is below the threshold, 0 in others: the difference is 0, or wraps around.
  __device__ __forceinline__ uint32_t flags(uint32_t word) const {
    return __viaddmin_u16x2(__vminu2(word, most), added, 0x10001u);
  }
};

}  // namespace flash_ext::sm90
