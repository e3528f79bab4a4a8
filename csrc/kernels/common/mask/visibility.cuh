// Visibility by a boolean mask or a block mask, as bits in shared memory: one word for a query and 32 keys of a tile,
// in the order of the keys (bits.cuh). Windows and lengths are analytic and not part of it.
#pragma once

#include "bits.cuh"
#include "block_lists.cuh"
#include "kernels/common/accumulators.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/params.h"

namespace flash_ext {

/// The boolean mask of one head.
struct MaskRows {
  const bool* data;
  int64_t row_stride, col_stride;

  __device__ __forceinline__ MaskRows(const ScoreView& mask, const Sequence& sequence)
      : MaskRows(mask, sequence.batch, sequence.head) {}
  __device__ __forceinline__ MaskRows(const ScoreView& mask, int batch, int head)
      : data(static_cast<const bool*>(mask.data)), row_stride(mask.row_stride), col_stride(mask.col_stride) {
    if (data) data += batch * mask.batch_stride + head * mask.head_stride;
  }
};

/// Whether a mask leaves any pair, or all pairs, of a tile.
struct TileVisibility {
  bool any, all;
};

/// Bit k: whether the mask lets query `row` see key `key` + k, for 16 keys.
__device__ __forceinline__ uint32_t mask_bits(const MaskRows& mask, int row, int key, int seqlen_k) {
  const bool* const g_bytes = mask.data + row * mask.row_stride + key * mask.col_stride;
  if (mask.col_stride == 1 && key + 16 <= seqlen_k && reinterpret_cast<uintptr_t>(g_bytes) % 16 == 0)
    return bits_of_bytes(__ldg(reinterpret_cast<const uint4*>(g_bytes)));
  uint32_t bits = 0;
  for (int k = 0; k < 16 && key + k < seqlen_k; ++k) bits |= static_cast<uint32_t>(g_bytes[k * mask.col_stride]) << k;
  return bits;
}

/// The bits of 32 keys.
__device__ __forceinline__ uint32_t mask_word(const MaskRows& mask, int row, int key, int seqlen_k) {
  const uint32_t low = mask_bits(mask, row, key, seqlen_k);
  return key + 16 < seqlen_k ? low | mask_bits(mask, row, key + 16, seqlen_k) << 16 : low;
}

/// Writes the words of the tile of queries [first_query, + kRows) and keys [first_key, + kKeys), word (row, group) to
/// s_words[row * (kKeys / 32) + group]. All kThreads of the CTA call it. It ends with a barrier, and begins with one
/// that lets earlier readers of s_words finish.
template <int kThreads, int kRows, int kKeys>
__device__ __forceinline__ TileVisibility build_visibility(uint32_t* s_words, const MaskRows& mask,
                                                           const BlockMaskRows& blocks, int first_query, int first_key,
                                                           int seqlen_q, int seqlen_k) {
  constexpr int kHalvesPerRow = kKeys / 16;  // of words: what 16 bytes of a mask make
  auto* const s_halves = reinterpret_cast<uint16_t*>(s_words);
  uint32_t any = 0, all = 0xFFFFu;
  __syncthreads();
#pragma unroll 4
  for (int flat = threadIdx.x; flat < kRows * kHalvesPerRow; flat += kThreads) {
    const int i = first_query + flat / kHalvesPerRow, j = first_key + flat % kHalvesPerRow * 16;
    uint32_t bits = 0;
    if (i < seqlen_q && j < seqlen_k) {
      bits = mask.data ? mask_bits(mask, i, j, seqlen_k) : 0xFFFFu;
      if (blocks.offsets && bits) bits &= blocks.word(i, j & ~31) >> (j & 16) & 0xFFFFu;
    }
    s_halves[flat] = static_cast<uint16_t>(bits);
    any |= bits;
    all &= bits;
  }
  const bool some = __syncthreads_or(any);
  return {some, some && __syncthreads_and(all == 0xFFFFu) != 0};
}

/// Sets the scores of a warp that visibility words hide to -inf. word(row, group) is the word of the lane's row, 0, 8,
/// 16, ... counted from its first one, and of the group-th 32 keys of the warp.
template <int kM, int kN, class Word>
__device__ __forceinline__ void hide_by_words(float (&s)[kM][kN][4], int lane, Word word) {
  for_each_score(s, [&](float& x, int m, int n, int e) {
    if (!KeyOrder::sees(word(16 * m + 8 * (e / 2), n / 4), n % 4, e % 2, lane)) x = -INFINITY;
  });
}

}  // namespace flash_ext
