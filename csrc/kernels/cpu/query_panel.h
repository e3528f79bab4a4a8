// Query rows and their panels. A panel is kPanel rows side by side, one per vector lane.
//
// A tile holds rows of one head or, for grouped-query decoding, the rows of all heads that share a key head
// interleaved (row = i * group + head in the group), so that a key is read once for all of them.
#pragma once

#include "sequence.h"
#include "tile_sizes.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

/// Consecutive rows of a tile.
struct QueryRows {
  int64_t first;
  int64_t count;
  int64_t first_head;
  int64_t group;

  int64_t query(int64_t row) const { return group == 1 ? first + row : (first + row) / group; }
  int64_t head(int64_t row) const { return group == 1 ? first_head : first_head + (first + row) % group; }
};

/// How the rows of a head are cut into tiles. No tile straddles two row blocks of a block mask.
struct RowTiles {
  int64_t tile_rows;
  int64_t block_m;  // 0 without a block mask
  int64_t seqlen_q;
  int64_t count;

  RowTiles(const AttentionParams& p, int64_t rows_per_tile, int64_t group = 1) {
    tile_rows = rows_per_tile;
    block_m = p.blocks.offsets != nullptr ? p.blocks.block_m : 0;
    seqlen_q = p.seqlen_q * group;
    count = count_for(seqlen_q);
  }

  int64_t count_for(int64_t rows) const {
    return block_m == 0 ? ceil_div(rows, tile_rows) : ceil_div(rows, block_m) * ceil_div(block_m, tile_rows);
  }

  Interval rows(int64_t tile, int64_t length) const {
    int64_t begin = tile * tile_rows;
    int64_t end = begin + tile_rows;
    if (block_m != 0) {
      const int64_t tiles_per_block = ceil_div(block_m, tile_rows);
      const int64_t block_begin = tile / tiles_per_block * block_m;
      begin = block_begin + tile % tiles_per_block * tile_rows;
      end = min(begin + tile_rows, block_begin + block_m);
    }
    return {min(begin, length), min(end, length)};
  }
};

/// The sequence that an item belongs to. Each tile of rows has `items_of_tile` items.
struct ItemOfSequence {
  int64_t batch;
  int64_t tiles;  // of the sequence
  int64_t index;  // of the item, among those of the sequence

  ItemOfSequence(const int64_t* tiles_before, int64_t batches, int64_t items_of_tile, int64_t item) {
    int64_t low = 0, high = batches;  // finds the last sequence that begins at or before the item
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (tiles_before[middle] * items_of_tile <= item) {
        low = middle;
      } else {
        high = middle;
      }
    }
    batch = low;
    tiles = tiles_before[low + 1] - tiles_before[low];
    index = item - tiles_before[low] * items_of_tile;
  }
};

/// The queries of a panel's lanes, and the keys that they see by the window.
template <class T>
struct Panel {
  static constexpr int kPanel = Shape<T>::kPanel;

  int count;       // lanes in use
  int vectors;     // vectors that hold a lane in use: 1 or all
  Interval some;   // keys that at least one lane sees
  Interval every;  // keys that every lane sees; none if a lane is not in use
  int64_t query[kPanel];
  int64_t head[kPanel];
  int64_t first_key[kPanel];  // lanes not in use see nothing
  int64_t end_key[kPanel];

  void set(const QueryRows& rows, int64_t first_row, const Sequence& seq) {
    count = static_cast<int>(clamp_index(rows.count - first_row, 0, kPanel));
    vectors = count <= Shape<T>::kLanes ? 1 : Shape<T>::kCols;
    for (int lane = 0; lane < kPanel; ++lane) {
      first_key[lane] = end_key[lane] = 0;
      if (lane >= count) continue;
      query[lane] = rows.query(first_row + lane);
      head[lane] = rows.head(first_row + lane);
      const Interval keys = visible_keys(query[lane], query[lane] + 1, seq.seqlen_k, seq.window);
      first_key[lane] = keys.begin;
      end_key[lane] = keys.end;
    }
    some = every = {0, 0};
    if (count > 0) some = visible_keys(query[0], query[count - 1] + 1, seq.seqlen_k, seq.window);
    if (count == kPanel) every = common_keys(query[0], query[count - 1] + 1, seq.seqlen_k, seq.window);
  }
};

FLASH_EXT_INLINE Interval intersect(const Interval& a, const Interval& b) {
  const Interval c{max(a.begin, b.begin), min(a.end, b.end)};
  return c.begin < c.end ? c : Interval{0, 0};
}

FLASH_EXT_INLINE bool contains(const Interval& outer, const Interval& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end;
}

/// Keys that a tile of rows can see.
FLASH_EXT_INLINE Interval visible_keys(const QueryRows& rows, const Sequence& seq) {
  if (rows.count <= 0) return {0, 0};
  return visible_keys(rows.query(0), rows.query(rows.count - 1) + 1, seq.seqlen_k, seq.window);
}

/// Where number d of a lane lies: in a panel, or in row-major rows for a few queries.
struct LaneLayout {
  int64_t lanes;
  int64_t dim_stride;
  int64_t lane_stride;

  constexpr int64_t at(int64_t d, int64_t lane) const { return d * dim_stride + lane * lane_stride; }
};

template <class T>
constexpr LaneLayout kPanelLayout{Shape<T>::kPanel, Shape<T>::kPanel, 1};

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
