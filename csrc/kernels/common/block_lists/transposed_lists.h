// Transposed block lists: for each column of blocks, the rows that list it.
//
// A column is looked up in as many rows at a time as there are lanes, so that rows come out in ascending order. Two
// passes, as in interval_lists.h. On CUDA several warps share the rows of a column.
#pragma once

#include <cstdint>

#include "kernels/common/block_lists/lanes.h"

namespace flash_ext {

/// Values are clamped to what the tensors hold.
struct TransposedListsParams {
  const int32_t* offsets = nullptr;     // (batch, heads, rows + 1)
  const int32_t* indices = nullptr;     // (num_blocks), ascending within a row
  const int32_t* bitmap_ids = nullptr;  // (num_blocks)
  const int32_t* bitmaps = nullptr;     // (num_bitmaps, block_m, block_n / 32)
  int64_t offsets_batch_stride = 0;
  int64_t offsets_head_stride = 0;
  int32_t batch = 0;
  int32_t heads = 0;
  int32_t rows = 0;
  int32_t columns = 0;  // batch * heads * (columns + 1) is counted in 32 bits
  int64_t num_blocks = 0;
  int64_t num_bitmaps = 0;
  int64_t block_m = 0;  // a multiple of 32
  int64_t block_n = 0;  // a multiple of 32

  int64_t max_blocks = 0;                    // entries that the results have room for
  int32_t* transposed_offsets = nullptr;     // (batch, heads, columns + 1)
  int32_t* transposed_indices = nullptr;     // (max_blocks)
  int32_t* transposed_bitmap_ids = nullptr;  // (max_blocks)
  int32_t* transposed_bitmaps = nullptr;     // (num_bitmaps, block_n, block_m / 32)
};

/// The entry of a column in the list of a row, or -1.
FLASH_EXT_LANES_CODE int64_t entry_of(const TransposedListsParams& p, const int32_t* offsets, int row, int column) {
  const auto within = [&](int64_t entry) { return entry < 0 ? 0 : entry < p.num_blocks ? entry : p.num_blocks; };
  int64_t low = within(offsets[row]);
  const int64_t end = within(offsets[row + 1]);
  for (int64_t high = end; low < high;) {
    const int64_t middle = low + (high - low) / 2;
    if (p.indices[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < end && p.indices[low] == column ? low : -1;
}

/// The index of a column's offset. `number` counts the columns of all heads. Each head has one more offset, after that
/// of its last column.
FLASH_EXT_LANES_CODE int64_t place_of_offset(const TransposedListsParams& p, int number) {
  return int64_t{number} + number / p.columns;
}

struct RowRange {
  int begin, end;
};

/// Counts the rows of a range that list a column and, unless `entry` is negative, writes them as entries from `entry`
/// on.
FLASH_EXT_LANES_CODE int rows_of_column(const TransposedListsParams& p, int number, RowRange rows, int64_t entry,
                                        const Lanes& lanes) {
  const int head = number / p.columns, column = number % p.columns;
  const int32_t* const offsets =
      p.offsets + head / p.heads * p.offsets_batch_stride + head % p.heads * p.offsets_head_stride;
  int count = 0;
  for (int first = rows.begin; first < rows.end; first += Lanes::kCount) {
    const int row = first + lanes.index;
    const int64_t found = row < rows.end ? entry_of(p, offsets, row, column) : -1;
    const int64_t place = entry + count + lanes.rank(found >= 0);
    if (found >= 0 && entry >= 0 && place < p.max_blocks) {
      p.transposed_indices[place] = row;
      p.transposed_bitmap_ids[place] = p.bitmap_ids[found];
    }
    count += lanes.count(found >= 0);
  }
  return count;
}

/// First pass: counts the rows of a range that list a column. The caller writes the sum over all ranges in the place of
/// the column's offset.
FLASH_EXT_LANES_CODE int count_rows(const TransposedListsParams& p, int number, RowRange rows, const Lanes& lanes) {
  return rows_of_column(p, number, rows, -1, lanes);
}

/// Second pass: writes the entries of a range of rows in a column, after the `before` entries of the rows before them.
FLASH_EXT_LANES_CODE void write_rows(const TransposedListsParams& p, int number, RowRange rows, int before,
                                     const Lanes& lanes) {
  rows_of_column(p, number, rows, int64_t{p.transposed_offsets[place_of_offset(p, number)]} + before, lanes);
}

/// The number of bit tiles, of 32 queries by 32 keys, of all bitmaps.
FLASH_EXT_LANES_CODE int64_t num_bit_tiles(const TransposedListsParams& p) {
  return p.num_bitmaps * (p.block_m / 32) * (p.block_n / 32);
}

/// Transposes the bits of a tile: bit b of word w of key j is bit j % 32 of query 32 w + b.
FLASH_EXT_LANES_CODE void transpose_bit_tile(const TransposedListsParams& p, int64_t bit_tile, const Lanes& lanes) {
  const int64_t query_words = p.block_m / 32, key_words = p.block_n / 32;
  const int64_t query_word = bit_tile % query_words, key_word = bit_tile / query_words % key_words;
  const int64_t bitmap = bit_tile / query_words / key_words;
  const int32_t* const queries = p.bitmaps + (bitmap * p.block_m + 32 * query_word) * key_words + key_word;
  int32_t* const keys = p.transposed_bitmaps + (bitmap * p.block_n + 32 * key_word) * query_words + query_word;
  for (int key = lanes.index; key < 32; key += Lanes::kCount) {
    uint32_t bits = 0;
    for (int query = 0; query < 32; ++query)
      bits |= (static_cast<uint32_t>(queries[query * key_words]) >> key & 1u) << query;
    keys[key * query_words] = static_cast<int32_t>(bits);
  }
}

}  // namespace flash_ext
