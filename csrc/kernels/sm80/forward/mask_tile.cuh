// A warp's tile of visibility by a block mask: one word for a query and 32 keys, in
// RegisterOrder.
#pragma once

#include "kernels/common/mask/bits.cuh"

namespace flash_ext::sm80 {

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
            if (!RegisterOrder::sees(bits, n, c)) s[m][n][2 * r + c] = -INFINITY;
      }
  }

 private:
  /// Bit 8 c + n is the lane's key c of the n-th 8 keys of a row.
  __device__ __forceinline__ static uint32_t lane_bits(const uint32_t* s_row, int lane) {
    static_assert(kGroups <= 2, "a byte has room for two groups");
    const uint32_t low = s_row[0] >> RegisterOrder::shift(lane);
    if constexpr (kGroups == 1) return low;
    const uint32_t word = s_row[kGroups - 1], high = __funnelshift_r(word, word, RegisterOrder::shift(lane) - 4);
    return (low & 0x0F0Fu) | (high & 0xF0F0u);
  }
};

}  // namespace flash_ext::sm80
