// Masks as a warp of the forward reads them: the bits of a boolean mask (mask_bits.h), or a block mask's words in
// shared memory.
#pragma once

#include "kernels/common/mask/bits.cuh"
#include "kernels/common/sequence.cuh"
#include "mask_bits.h"

namespace flash_ext::sm80 {

/// The visibility bits of a warp's kRows rows and a tile of kKeys keys.
template <int kRows, int kKeys>
struct WarpVisibility {
  static constexpr int kUnits = kKeys / kMaskKeys;
  uint32_t words[kUnits];

  /// `g_block`: the words of the CTA's queries.
  __device__ __forceinline__ void load(const MaskBits& bits, const uint32_t* g_block, int warp_row, int first_key,
                                       int lane) {
    const int unit = warp_row / kMaskRows * bits.row_stride + first_key / kMaskKeys;
    const uint32_t* const g_words = g_block + unit * kMaskRows + lane;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      words[k] = __ldg(g_words + k * kMaskRows);
      // A word has 8 bits for each of four rows of a lane.
      if constexpr (kRows == 16) words[k] >>= warp_row & 16;
    }
  }

  /// Sets hidden scores to -inf.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&s)[kM][kN][4]) const {
    static_assert(kM == kRows / 16 && kN == kKeys / 8);
    uint32_t visible = ~0u;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) visible &= words[k];
    if (__all_sync(~0u, (kRows == 16 ? visible | 0xFFFF0000u : visible) == ~0u)) return;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!QuadOrder::sees(words[n / 4] >> (16 * m + 8 * (e / 2)), n % 4, e % 2)) s[m][n][e] = -INFINITY;
  }
};

/// Bit k: whether the mask leaves something of tile 32 group + k, for the kRows queries from first_query on.
template <int kRows, int kKeys>
__device__ __forceinline__ uint32_t visible_tiles(const MaskBits& bits, const Sequence& sequence, int first_query,
                                                  int group, int lane) {
  constexpr int kUnits = kKeys / kMaskKeys;
  const int tile = 32 * group + lane;
  uint32_t states = 0;
  if (tile * kUnits < bits.key_units) {
#pragma unroll
    for (int row = 0; row < kRows / kMaskRows; ++row) {
      const uint8_t* const g_states =
          bits.states + bits.unit(sequence.batch, sequence.head, first_query / kMaskRows + row, tile * kUnits);
#pragma unroll
      for (int k = 0; k < kUnits; ++k) states |= __ldg(g_states + k);
    }
  }
  return __ballot_sync(~0u, states != 0);
}

/// A warp's tile of a block mask: one word for a query and 32 keys, in RegisterOrder.
template <int kRows, int kKeys>
struct MaskTile {
  static constexpr int kWords = kKeys / 32;

  /// Sets scores to -inf that the words of the warp's rows hide, word (row, group) at s_words[row * kWords + group].
  template <int kM, int kN>
  __device__ __forceinline__ static void hide(float (&s)[kM][kN][4], const uint32_t* s_words, int lane) {
    const uint32_t* const s_lane = s_words + lane / 4 * kWords;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t bits = lane_bits(s_lane + (16 * m + 8 * r) * kWords, lane);
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
    static_assert(kWords <= 2, "a byte has room for two groups");
    const uint32_t low = s_row[0] >> RegisterOrder::shift(lane);
    if constexpr (kWords == 1) return low;
    const uint32_t word = s_row[kWords - 1], high = __funnelshift_r(word, word, RegisterOrder::shift(lane) - 4);
    return (low & 0x0F0Fu) | (high & 0xF0F0u);
  }
};

}  // namespace flash_ext::sm80
