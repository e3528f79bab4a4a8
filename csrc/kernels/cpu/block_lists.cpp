#include "block_lists.h"

#include <algorithm>

namespace flash_ext::cpu {
namespace {

constexpr int64_t kGrainRows = 4;       // of blocks, so that threads are worth their start
constexpr int64_t kGrainBitTiles = 64;  // of bitmaps

/// Turns counts into offsets: `offsets` (lists, rows + 1) holds a count for each row, and nothing at the end of a list.
/// Each count becomes the index at which its row begins. Returns the end of all rows.
int64_t sum_up(int32_t* offsets, int64_t lists, int64_t rows, int64_t max_blocks) {
  int64_t sum = 0;
  for (int64_t list = 0; list < lists; ++list) {
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t count = *offsets;
      *offsets++ = static_cast<int32_t>(sum);
      sum = std::min(sum + count, max_blocks);
    }
    *offsets++ = static_cast<int32_t>(sum);
  }
  return sum;
}

void clear(int32_t* entries, int64_t begin, int64_t end) { std::fill(entries + begin, entries + end, 0); }

/// Calls body for each number below `count`.
template <class Body>
void for_each(int64_t count, int64_t grain, ParallelFor parallel_for, const Body& body) {
  parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) body(n);
  });
}

}  // namespace

void interval_block_lists(const IntervalListsParams& p, ParallelFor parallel_for) {
  const int64_t rows = p.batch * p.rows;
  for_each(rows, kGrainRows, parallel_for, [&](int row) { count_blocks(p, row, Lanes()); });
  const int64_t end = sum_up(p.offsets, p.batch, p.rows, p.max_blocks);
  for_each(rows, kGrainRows, parallel_for, [&](int row) { write_blocks(p, row, Lanes()); });
  clear(p.indices, end, p.max_blocks);
  clear(p.bitmap_ids, end, p.max_blocks);
}

void block_lists_transposed(const TransposedListsParams& p, ParallelFor parallel_for) {
  const int64_t heads = int64_t{p.batch} * p.heads, columns = heads * p.columns;
  const RowRange rows{0, p.rows};
  for_each(columns, kGrainRows, parallel_for, [&](int column) {
    p.transposed_offsets[place_of_offset(p, column)] = count_rows(p, column, rows, Lanes());
  });
  const int64_t end = sum_up(p.transposed_offsets, heads, p.columns, p.max_blocks);
  for_each(columns, kGrainRows, parallel_for, [&](int column) { write_rows(p, column, rows, 0, Lanes()); });
  for_each(num_bit_tiles(p), kGrainBitTiles, parallel_for,
           [&](int64_t bit_tile) { transpose_bit_tile(p, bit_tile, Lanes()); });
  clear(p.transposed_indices, end, p.max_blocks);
  clear(p.transposed_bitmap_ids, end, p.max_blocks);
}

}  // namespace flash_ext::cpu
