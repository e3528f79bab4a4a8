// Transposes panels, which hold one query per lane, to rows as they lie in memory.
#pragma once

#include "simd.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

#if defined(__AVX512F__)
/// Stores 16 rows of 16 words transposed: row[r] becomes column r. The stored rows are `stride` words apart.
FLASH_EXT_INLINE void store_transposed(uint32_t* to, int64_t stride, __m512i (&row)[16]) {
  __m512i pairs[16];
#pragma GCC unroll 8
  for (int r = 0; r < 16; r += 2) {
    pairs[r] = _mm512_unpacklo_epi32(row[r], row[r + 1]);
    pairs[r + 1] = _mm512_unpackhi_epi32(row[r], row[r + 1]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 16; r += 4) {
    row[r] = _mm512_unpacklo_epi64(pairs[r], pairs[r + 2]);
    row[r + 1] = _mm512_unpackhi_epi64(pairs[r], pairs[r + 2]);
    row[r + 2] = _mm512_unpacklo_epi64(pairs[r + 1], pairs[r + 3]);
    row[r + 3] = _mm512_unpackhi_epi64(pairs[r + 1], pairs[r + 3]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    pairs[r] = _mm512_shuffle_i32x4(row[r], row[r + 4], 0x88);
    pairs[r + 4] = _mm512_shuffle_i32x4(row[r], row[r + 4], 0xDD);
    pairs[r + 8] = _mm512_shuffle_i32x4(row[r + 8], row[r + 12], 0x88);
    pairs[r + 12] = _mm512_shuffle_i32x4(row[r + 8], row[r + 12], 0xDD);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    _mm512_storeu_si512(to + r * stride, _mm512_shuffle_i32x4(pairs[r], pairs[r + 8], 0x88));
    _mm512_storeu_si512(to + (r + 4) * stride, _mm512_shuffle_i32x4(pairs[r + 4], pairs[r + 12], 0x88));
    _mm512_storeu_si512(to + (r + 8) * stride, _mm512_shuffle_i32x4(pairs[r], pairs[r + 8], 0xDD));
    _mm512_storeu_si512(to + (r + 12) * stride, _mm512_shuffle_i32x4(pairs[r + 4], pairs[r + 12], 0xDD));
  }
}
#endif

/// Stores a panel (num_rows, kPanel) as row-major rows of `stride` numbers: to[lane][row] = panel[row][lane].
template <class T>
void store_lanes(T* to, int64_t stride, const T* panel, int64_t num_rows) {
  constexpr int kPanel = Shape<T>::kPanel;
  int64_t row = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(uint32_t)) {
    for (; row + 16 <= num_rows; row += 16) {
      for (int lane = 0; lane < kPanel; lane += 16) {
        __m512i words[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) words[r] = _mm512_loadu_si512(panel + (row + r) * kPanel + lane);
        store_transposed(reinterpret_cast<uint32_t*>(to + lane * stride + row), stride, words);
      }
    }
  }
#endif
  for (; row < num_rows; ++row) {
    for (int lane = 0; lane < kPanel; ++lane) to[lane * stride + row] = panel[row * kPanel + lane];
  }
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
