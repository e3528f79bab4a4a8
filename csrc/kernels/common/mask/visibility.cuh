// Visibility by a boolean mask or a block mask, as bits in shared memory: one word for a query and 32 keys of a tile.
// Windows and lengths are analytic and not part of it.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/params.h"

namespace flash_ext {

/// The first of the blocks [low, high) of a row that does not lie before `key_block`.
__device__ __forceinline__ int first_block_from(const int32_t* indices, int low, int high, int key_block) {
  while (low < high) {
    const int middle = (low + high) / 2;
    if (indices[middle] < key_block) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The block-sparse mask of one head.
struct BlockMaskRows {
  const BlockMaskParams& p;
  const int32_t* offsets;

  __device__ __forceinline__ BlockMaskRows(const BlockMaskParams& p, const Sequence& sequence)
      : p(p),
        offsets(p.offsets ? p.offsets + sequence.batch * p.offsets_batch_stride + sequence.head * p.offsets_head_stride
                          : nullptr) {}

  /// Bit b: whether query i sees key first_key + b, a multiple of 32.
  __device__ __forceinline__ uint32_t word(int i, int first_key) const {
    const int block_m = static_cast<int>(p.block_m), block_n = static_cast<int>(p.block_n);
    const int row_block = i / block_m, key_block = first_key / block_n;
    if (row_block >= p.num_row_blocks) return 0;
    const int num_blocks = static_cast<int>(p.num_blocks);
    const int begin = min(max(offsets[row_block], 0), num_blocks);
    const int end = min(max(offsets[row_block + 1], begin), num_blocks);
    const int found = first_block_from(p.indices, begin, end, key_block);
    if (found >= end || p.indices[found] != key_block) return 0;
    const int64_t id = min(p.bitmap_ids[found], static_cast<int32_t>(p.num_bitmaps) - 1);
    if (id < 0) return ~0u;
    const int words = block_n / 32;
    return static_cast<uint32_t>(p.bitmaps[(id * block_m + i % block_m) * words + first_key % block_n / 32]);
  }
};

/// The boolean mask of one head.
struct MaskRows {
  const bool* data;
  int64_t row_stride, col_stride;

  __device__ __forceinline__ MaskRows(const ScoreView& mask, const Sequence& sequence)
      : data(static_cast<const bool*>(mask.data)), row_stride(mask.row_stride), col_stride(mask.col_stride) {
    if (data) data += sequence.batch * mask.batch_stride + sequence.head * mask.head_stride;
  }
};

/// How much of a tile some mask leaves.
struct TileVisibility {
  bool any, all;
};

/// Bits of 16 neighbouring keys, as bytes of 0 and 1.
__device__ __forceinline__ uint32_t bits_of_bytes(const uint4& bytes) {
  // The product brings the bytes' lowest bits together in bits 24 to 27.
  const auto nibble = [](uint32_t word) { return (word * 0x01020408u) >> 24 & 0xFu; };
  return nibble(bytes.x) | nibble(bytes.y) << 4 | nibble(bytes.z) << 8 | nibble(bytes.w) << 12;
}

/// Which of the 16 keys from `key` on query `row` may see, by the mask.
__device__ __forceinline__ uint32_t mask_bits(const MaskRows& mask, int row, int key, int seqlen_k) {
  const bool* const g_bytes = mask.data + row * mask.row_stride + key * mask.col_stride;
  if (mask.col_stride == 1 && key + 16 <= seqlen_k && reinterpret_cast<uintptr_t>(g_bytes) % 16 == 0)
    return bits_of_bytes(__ldg(reinterpret_cast<const uint4*>(g_bytes)));
  uint32_t bits = 0;
  for (int k = 0; k < 16 && key + k < seqlen_k; ++k) bits |= static_cast<uint32_t>(g_bytes[k * mask.col_stride]) << k;
  return bits;
}

/// The words of the tile of queries [first_query, + kRows) and keys [first_key, + kKeys), word (row, group) at
/// s_words[row * (kKeys / 32) + group]. All kThreads of the block call it; it ends with a barrier, and begins with one
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

}  // namespace flash_ext
