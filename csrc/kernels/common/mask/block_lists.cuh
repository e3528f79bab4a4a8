// Lookup in the lists of a block mask: the key blocks of a row of blocks, ascending, and the bitmap of each. The device
// does not check their values, so they are clamped to what the tensors hold.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/params.h"

namespace flash_ext {

/// Entries [begin, end) of the lists.
struct BlockEntries {
  int begin, end;
};

/// The entries of one row of blocks.
__device__ __forceinline__ BlockEntries entries_of_row(const int32_t* offsets, int row, int num_blocks) {
  const int begin = min(max(offsets[row], 0), num_blocks);
  return {begin, min(max(offsets[row + 1], begin), num_blocks)};
}

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

/// The offsets of the head `at.head` of batch entry `at.batch`.
template <class At>
__device__ __forceinline__ const int32_t* block_offsets(const BlockMaskParams& p, const At& at) {
  return p.offsets + at.batch * p.offsets_batch_stride + at.head * p.offsets_head_stride;
}

/// The bitmap of an entry; negative: every pair is visible.
__device__ __forceinline__ int bitmap_of(const BlockMaskParams& p, int entry) {
  return min(p.bitmap_ids[entry], static_cast<int32_t>(p.num_bitmaps) - 1);
}

/// Bit b: whether query i sees key first_key + b, a multiple of 32, by the bitmap of their block.
__device__ __forceinline__ uint32_t bitmap_word(const BlockMaskParams& p, int block_m, int block_n, int64_t bitmap,
                                                int i, int first_key) {
  const int words = block_n / 32;
  return static_cast<uint32_t>(p.bitmaps[(bitmap * block_m + i % block_m) * words + first_key % block_n / 32]);
}

/// The block mask of one head.
struct BlockMaskRows {
  const BlockMaskParams& p;
  const int32_t* offsets;  // null: there is none

  __device__ __forceinline__ BlockMaskRows(const BlockMaskParams& p, const Sequence& sequence)
      : p(p), offsets(p.offsets ? block_offsets(p, sequence) : nullptr) {}

  __device__ __forceinline__ BlockEntries entries(int row) const {
    return entries_of_row(offsets, row, static_cast<int>(p.num_blocks));
  }

  /// Bit b: whether query i sees key first_key + b, a multiple of 32.
  __device__ __forceinline__ uint32_t word(int i, int first_key) const {
    const int block_m = static_cast<int>(p.block_m), block_n = static_cast<int>(p.block_n);
    const int row_block = i / block_m, key_block = first_key / block_n;
    if (row_block >= p.num_row_blocks) return 0;
    const BlockEntries row = entries(row_block);
    const int found = first_block_from(p.indices, row.begin, row.end, key_block);
    if (found >= row.end || p.indices[found] != key_block) return 0;
    const int64_t bitmap = bitmap_of(p, found);
    return bitmap < 0 ? ~0u : bitmap_word(p, block_m, block_n, bitmap, i, first_key);
  }
};

}  // namespace flash_ext
