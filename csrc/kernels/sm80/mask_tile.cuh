// A warp's tile of visibility: a boolean mask comes as bytes by cp.async, one tile ahead, and becomes one word for a
// query and 32 keys. No other warp reads either, so that nothing but the copies has to be waited for.
//
// The words are in lane order: key 4 j + k of a word's 32 is its bit 8 k + j / 2 + 4 (j % 2). So eight additions make a
// word out of eight words of bytes, and a lane finds its keys 8 n + 2 t + c, t = lane % 4, at bits 8 c + n once it has
// shifted by lane_shift(). That bits of one register follow each other makes predicates of them by the half dozen.
#pragma once

#include "../common/visibility.cuh"
#include "tile.cuh"

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

/// kRows queries and kKeys keys. One row stands for all where the mask is the same for every query.
template <int kRows, int kKeys>
struct MaskTile {
  static constexpr int kPieces = kKeys / 16, kGroups = kKeys / 32;
  static constexpr int kBytes = kRows * kKeys;

  uint32_t s_bytes;
  const ScoreView& mask;
  int lane;

  __device__ __forceinline__ bool same_for_all() const { return mask.row_stride == 0; }

  /// Byte offset of a piece: eight rows of one column of pieces lie in eight different groups of banks.
  __device__ __forceinline__ static uint32_t at(int row, int piece) {
    constexpr int kRowsPerLine = 8 / kPieces;
    return static_cast<uint32_t>(row * kKeys + ((piece ^ row / kRowsPerLine) & (kPieces - 1)) * 16);
  }

  /// Without waiting. Keys from seqlen_k on and queries from seqlen_q on are hidden.
  __device__ __forceinline__ void load(const Sequence& sequence, int first_query, int first_key) const {
    const int first_row = lane / kPieces, piece = lane % kPieces, key = first_key + 16 * piece;
    const int bytes = min(max(sequence.seqlen_k - key, 0), 16);
    const int rows = same_for_all() ? 1 : min(sequence.seqlen_q - first_query, kRows);
    constexpr int kStep = 32 / kPieces;
    const char* const g_head =
        static_cast<const char*>(mask.data) + sequence.batch * mask.batch_stride + sequence.head * mask.head_stride;
    const char* g_piece = g_head + (first_query + first_row) * mask.row_stride + key;
    const int64_t step = kStep * mask.row_stride;
    if (rows == kRows && first_key + kKeys <= sequence.seqlen_k) {  // nearly always
#pragma unroll
      for (int row = 0; row < kRows; row += kStep, g_piece += step)
        ptx::cp_async_16(s_bytes + at(first_row + row, piece), g_piece);
      return;
    }
#pragma unroll 1
    for (int row = 0; row < kRows; row += kStep, g_piece += step) {
      const bool valid = bytes > 0 && first_row + row < rows;
      ptx::cp_async_16_of(s_bytes + at(first_row + row, piece), valid ? g_piece : g_head, valid ? bytes : 0);
      if (same_for_all()) return;
    }
  }

  /// Words of the bytes, word (row, group) at s_words[row * kGroups + group]; what is visible in this lane's words.
  __device__ __forceinline__ TileVisibility make_words(uint32_t* s_words) const {
    uint32_t any = 0, all = ~0u;
#pragma unroll
    for (int flat = lane; flat < kRows * kGroups; flat += 32) {
      const int row = flat % kRows, group = flat / kRows;
      if (same_for_all() && row > 0) continue;
      const uint4 low = load_shared<uint4>(s_bytes + at(row, 2 * group));
      const uint4 high = load_shared<uint4>(s_bytes + at(row, 2 * group + 1));
      uint32_t word = high.w;
      for (const uint32_t bytes : {high.y, low.w, low.y, high.z, high.x, low.z, low.x}) word = word + word + bytes;
      s_words[row * kGroups + group] = word;
      any |= word;
      all &= word;
    }
    return {any != 0, all == ~0u};
  }

  /// Hides by -inf what the words of the warp's rows hide.
  template <int kM, int kN>
  __device__ __forceinline__ static void hide(float (&s)[kM][kN][4], const uint32_t* s_words, bool same_for_all,
                                              int lane) {
    if (same_for_all) return hide_columns(s, s_words, lane);
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

  template <int kM, int kN>
  __device__ __forceinline__ static void hide_columns(float (&s)[kM][kN][4], const uint32_t* s_words, int lane) {
    const uint32_t bits = lane_bits(s_words, lane);
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const bool hidden = !(bits >> (8 * c + n) & 1u);
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r)
            if (hidden) s[m][n][2 * r + c] = -INFINITY;
      }
  }
};

}  // namespace flash_ext::sm80
