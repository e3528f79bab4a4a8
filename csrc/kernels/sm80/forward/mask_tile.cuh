// A warp's tile of visibility by a block mask: one word for a query and 32 keys.
//
// The words are in lane order: key 4 j + k of a word's 32 is its bit 8 k + j / 2 + 4 (j % 2). A lane finds its keys
// 8 n + 2 t + c, t = lane % 4, at bits 8 c + n once it has shifted by lane_shift(). That bits of one register follow
// each other makes predicates of them by the half dozen.
#pragma once

#include "kernels/common/mask/visibility.cuh"

namespace flash_ext::sm80 {

__device__ __forceinline__ int lane_shift(int lane) { return 16 * (lane & 1) + 4 * (lane >> 1 & 1); }

/// A word of build_visibility() in lane order.
__device__ __forceinline__ uint32_t in_lane_order(uint32_t word) {
  // The product brings the bytes' lowest bits together in bits 24 to 27.
  const auto nibble = [](uint32_t bytes) { return ((bytes & 0x01010101u) * 0x01020408u) >> 24 & 0xFu; };
  uint32_t result = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) result |= (nibble(word >> k) | nibble(word >> (k + 4)) << 4) << (8 * k);
  return result;
}

template <int kRows, int kKeys>
struct MaskTile {
  static constexpr int kGroups = kKeys / 32;

  /// Hides by -inf what the words of the warp's rows hide, word (row, group) at s_words[row * kGroups + group].
  template <int kM, int kN>
  __device__ __forceinline__ static void hide(float (&s)[kM][kN][4], const uint32_t* s_words, int lane) {
    const uint32_t* const s_lane = s_words + lane / 4 * kGroups;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t bits = lane_bits(s_lane + (16 * m + 8 * r) * kGroups, lane);
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int n = 0; n < kN; ++n)
            if (!(bits >> (8 * c + n) & 1u)) s[m][n][2 * r + c] = -INFINITY;
      }
  }

 private:
  /// Bit 8 c + n is the lane's key c of the n-th 8 keys of a row.
  __device__ __forceinline__ static uint32_t lane_bits(const uint32_t* s_row, int lane) {
    static_assert(kGroups <= 2, "a byte has room for two groups");
    const uint32_t low = s_row[0] >> lane_shift(lane);
    if constexpr (kGroups == 1) return low;
    const uint32_t word = s_row[kGroups - 1], high = __funnelshift_r(word, word, lane_shift(lane) - 4);
    return (low & 0x0F0Fu) | (high & 0xF0F0u);
  }
};

}  // namespace flash_ext::sm80
