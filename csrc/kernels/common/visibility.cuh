// Visibility by a boolean mask or a block mask, as bits in shared memory: one word for a query and 32 keys of a tile.
// Windows and lengths are analytic and not part of it.
#pragma once

#include "../params.h"
#include "sequence.cuh"

namespace flash_ext {

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
    int low = min(max(offsets[row_block], 0), num_blocks);
    const int end = min(max(offsets[row_block + 1], low), num_blocks);
    int high = end;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (p.indices[middle] < key_block) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low >= end || p.indices[low] != key_block) return 0;
    const int64_t id = min(p.bitmap_ids[low], static_cast<int32_t>(p.num_bitmaps) - 1);
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

/// The words of the tile of queries [first_query, + kRows) and keys [first_key, + kKeys), word (row, group) at
/// s_words[row * (kKeys / 32) + group]. All kThreads of the block call it; it ends with a barrier, and begins with one
/// that lets earlier readers of s_words finish.
template <int kThreads, int kRows, int kKeys>
__device__ __forceinline__ TileVisibility build_visibility(uint32_t* s_words, const MaskRows& mask,
                                                           const BlockMaskRows& blocks, int first_query, int first_key,
                                                           int seqlen_q, int seqlen_k) {
  constexpr int kGroups = kKeys / 32, kWords = kRows * kGroups;
  const int lane = threadIdx.x % 32;
  bool any = false, all = true;
  __syncthreads();
  // A warp makes 32 words at a time: lane l looks up blocks for word l, then all lanes read the mask word by word.
  for (int first = threadIdx.x / 32 * 32; first < kWords; first += kThreads) {
    const int flat = first + lane;
    const int i = first_query + flat / kGroups, j = first_key + flat % kGroups * 32;
    uint32_t word = flat < kWords && i < seqlen_q && j < seqlen_k ? ~0u : 0u;
    if (word && blocks.offsets) word = blocks.word(i, j);
    if (mask.data) {
#pragma unroll 8
      for (int other = 0; other < 32; ++other) {
        const int row = first_query + (first + other) / kGroups;
        const int key = first_key + (first + other) % kGroups * 32 + lane;
        const bool inside = row < seqlen_q && key < seqlen_k;
        const uint32_t seen = __ballot_sync(~0u, inside && mask.data[row * mask.row_stride + key * mask.col_stride]);
        if (other == lane) word &= seen;
      }
    }
    if (flat < kWords) {
      s_words[flat] = word;
      any |= word != 0;
      all &= word == ~0u;
    }
  }
  const bool some = __syncthreads_or(any);
  return {some, some && __syncthreads_and(all) != 0};
}

}  // namespace flash_ext
