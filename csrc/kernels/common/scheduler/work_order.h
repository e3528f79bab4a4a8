// The order in which CTAs take the tiles of sequences whose lengths only the device knows. Host and device share it:
// the kernel that lists the tiles (work_list.cuh), the plan, and tests.
//
// Sequences are sorted longest first. Neighbours form a section if their rows of the other side, for all heads, fit
// together into L2 or into a part of it; a sequence that does not fit is a section of its own. Within a section the
// tiles that cost the most come first. Tiles of equal cost stand side by side, from all sequences and heads of the
// section. This balances the tail wave, and tiles that read the same data run at the same time. In a section of one
// long sequence as many heads run side by side as fit, in whole bundles: an entry of the list is a tile for a bundle of
// heads.
//
// Under a causal mask the last queries of a sequence see the most keys, and its first keys have the most queries. So
// the rank of a tile counts from one end of its sequence, and its cost is the number of tiles left to the other end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/common/host_device.h"

namespace flash_ext {

/// The parameters of the order, which the host sets.
struct WorkOrder {
  int32_t block;         // rows of a tile
  int32_t heads;         // each tile of a sequence is a work tile for so many heads
  int32_t bundle_heads;  // heads of an entry; divides `heads`
  int32_t bundles;       // of all heads
  bool last_tile_first;  // of a sequence: the tile that costs the most
  int64_t rows_in_l2;    // rows of the other side that fit into L2, for a bundle of heads
  int64_t section_rows;  // the same, of a section of several sequences: at most rows_in_l2
};

/// `head_group`: heads that read the same rows of the other side. rows_in_l2: for one such group. Bundles have whole
/// groups, and there are at most kMostBundles: more make a longer list, fewer read more heads at a time than fit.
/// section_part: a section of several sequences has one in so many of the rows that fit.
inline WorkOrder work_order(int64_t block, int64_t heads, int64_t head_group, bool last_tile_first, int64_t rows_in_l2,
                            int64_t section_part) {
  constexpr int64_t kMostBundles = 4;
  const int64_t groups = heads / head_group;
  int64_t bundle = 1;
  while (groups % bundle != 0 || groups / bundle > kMostBundles) ++bundle;
  return {static_cast<int32_t>(block),
          static_cast<int32_t>(heads),
          static_cast<int32_t>(bundle * head_group),
          static_cast<int32_t>(groups / bundle),
          last_tile_first,
          std::max<int64_t>(1, rows_in_l2 / bundle),
          std::max<int64_t>(1, rows_in_l2 / bundle / section_part)};
}

/// A tile of a sequence, for the heads of a bundle.
struct alignas(16) ListedTile {
  int32_t sequence;
  int32_t tile;
  int32_t first_head;
  int32_t tiles;  // of the sequence
};

/// A work tile.
struct TileIndex {
  int32_t sequence;
  int32_t head;
  int32_t tile;  // kNoTile: there is none, and none after it in a list
};

constexpr int32_t kNoTile = INT32_MAX;

/// At most so many sequences are sorted together. More are listed chunk by chunk.
constexpr int kWorkListChunk = 4096;

// A sequence as it is sorted: longest first, then by the other side's rows, then in their order.
constexpr int kSequenceBits = 12, kOtherRowsBits = 25, kOtherRowsUnit = 4;
static_assert(1 << kSequenceBits == kWorkListChunk);

/// sequence: counted from the first of the chunk.
FLASH_EXT_HOST_DEVICE uint64_t sequence_key(int64_t tiles, int64_t other_rows, int sequence) {
  const uint64_t units = static_cast<uint64_t>((other_rows + kOtherRowsUnit - 1) / kOtherRowsUnit);
  const uint64_t most = (uint64_t{1} << kOtherRowsBits) - 1;
  return static_cast<uint64_t>(tiles) << (kOtherRowsBits + kSequenceBits) |
         (units < most ? units : most) << kSequenceBits | static_cast<uint64_t>(kWorkListChunk - 1 - sequence);
}
FLASH_EXT_HOST_DEVICE int32_t tiles_of_key(uint64_t key) {
  return static_cast<int32_t>(key >> (kOtherRowsBits + kSequenceBits));
}
FLASH_EXT_HOST_DEVICE int64_t other_rows_of_key(uint64_t key) {
  return static_cast<int64_t>(key >> kSequenceBits & ((uint64_t{1} << kOtherRowsBits) - 1)) * kOtherRowsUnit;
}
FLASH_EXT_HOST_DEVICE int sequence_of_key(uint64_t key) {
  return kWorkListChunk - 1 - static_cast<int>(key & (kWorkListChunk - 1));
}

FLASH_EXT_HOST_DEVICE int64_t tiles_of_rows(int64_t rows, int64_t block) { return (rows + block - 1) / block; }

/// Whether the rows of the other side are too many to be read side by side for all heads.
FLASH_EXT_HOST_DEVICE bool has_own_section(const WorkOrder& order, int64_t other_rows) {
  return other_rows * order.bundles > order.rows_in_l2;
}

/// The number of a sequence's section. rows_before: the other side's rows of all sequences before it in the order.
FLASH_EXT_HOST_DEVICE int64_t section_number(const WorkOrder& order, int64_t rows_before) {
  return rows_before * order.bundles / order.section_rows;
}

/// Whether a section begins with the sequence of `key`. previous_key: of the sequence before it in the order.
/// rows_before: the other side's rows of all sequences before it.
FLASH_EXT_HOST_DEVICE bool begins_section(const WorkOrder& order, uint64_t key, uint64_t previous_key,
                                          int64_t rows_before) {
  const int64_t previous_rows = other_rows_of_key(previous_key);
  return has_own_section(order, other_rows_of_key(key)) || has_own_section(order, previous_rows) ||
         section_number(order, rows_before) != section_number(order, rows_before - previous_rows);
}

/// The tile of a sequence that has a rank among its tiles, 0 = costs the most.
FLASH_EXT_HOST_DEVICE int32_t tile_of_rank(const WorkOrder& order, int32_t tiles, int32_t rank) {
  return order.last_tile_first ? tiles - 1 - rank : rank;
}

/// The position of a sequence's tile of this rank among the tiles of its section. The section has the sequences of the
/// sorted keys [begin, end); tiles_before counts the tiles of all sequences before one.
FLASH_EXT_HOST_DEVICE int64_t index_among_tiles(const uint64_t* keys, const int64_t* tiles_before, int begin, int end,
                                                int sequence, int32_t rank) {
  const int32_t cost = tiles_of_key(keys[sequence]) - rank;
  // Only sequences with more tiles than `cost` have tiles that cost more.
  int low = begin, high = end;
  if (tiles_of_key(keys[end - 1]) > cost) low = end;
  if (tiles_of_key(keys[begin]) <= cost) high = begin;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tiles_of_key(keys[middle]) > cost) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return tiles_before[low] - tiles_before[begin] - int64_t{low - begin} * cost + sequence - begin;
}

/// The position, within its section, of the entry for a bundle, from the tile's rank and its position among the tiles.
FLASH_EXT_HOST_DEVICE int64_t index_in_section(const WorkOrder& order, uint64_t key, int32_t rank, int64_t index,
                                               int32_t bundle) {
  const int64_t other_rows = other_rows_of_key(key);
  if (!has_own_section(order, other_rows)) return index * order.bundles + bundle;
  const int64_t fitting = order.rows_in_l2 / other_rows;
  const int32_t together = fitting > 1 ? static_cast<int32_t>(fitting) : 1;  // bundles
  const int32_t first = bundle / together * together, left = order.bundles - first;
  const int32_t width = left < together ? left : together;
  return int64_t{first} * tiles_of_key(key) + int64_t{rank} * width + (bundle - first);
}

/// The most tiles that `batch` sequences can have with `rows` rows in total, none longer than `longest`.
FLASH_EXT_HOST_DEVICE int64_t most_tiles(int64_t batch, int64_t longest, int64_t rows, int64_t block) {
  const int64_t by_length = batch * tiles_of_rows(longest, block);
  const int64_t by_rows = (rows + batch * (block - 1)) / block;  // each sequence has at most one partial tile
  return by_length < by_rows ? by_length : by_rows;
}

/// Whether the tiles of packed sequences are listed. A list takes some 4 microseconds; a CTA without a tile takes half
/// a microsecond of one SM. The second dimension of a grid counts to kMostGridRows.
FLASH_EXT_HOST_DEVICE bool lists_tiles(int64_t batch, int64_t longest, int64_t rows, int64_t block, int64_t heads) {
  constexpr int64_t kWorthAList = 1024, kMostGridRows = 65535;
  const int64_t tiles = tiles_of_rows(longest, block);
  return tiles > kMostGridRows || (batch * tiles - most_tiles(batch, longest, rows, block)) * heads > kWorthAList;
}

/// The list that the device writes for sequences with these numbers of rows.
inline std::vector<ListedTile> list_tiles(const WorkOrder& order, const std::vector<int64_t>& rows,
                                          const std::vector<int64_t>& other_rows) {
  std::vector<ListedTile> list;
  for (size_t first = 0; first < rows.size(); first += kWorkListChunk) {
    const int size = static_cast<int>(std::min<size_t>(rows.size() - first, kWorkListChunk));
    std::vector<uint64_t> keys(size);
    for (int k = 0; k < size; ++k)
      keys[k] = sequence_key(tiles_of_rows(rows[first + k], order.block), other_rows[first + k], k);
    std::sort(keys.rbegin(), keys.rend());
    std::vector<int64_t> tiles_before(size + 1), rows_before(size + 1);
    for (int k = 0; k < size; ++k) {
      tiles_before[k + 1] = tiles_before[k] + tiles_of_key(keys[k]);
      rows_before[k + 1] = rows_before[k] + other_rows_of_key(keys[k]);
    }
    const size_t base = list.size();
    list.resize(base + tiles_before[size] * order.bundles);
    for (int begin = 0, end = 0; begin < size; begin = end) {
      for (end = begin + 1; end < size && !begins_section(order, keys[end], keys[end - 1], rows_before[end]);) ++end;
      for (int k = begin; k < end; ++k)
        for (int rank = 0; rank < tiles_of_key(keys[k]); ++rank) {
          const int64_t index = index_among_tiles(keys.data(), tiles_before.data(), begin, end, k, rank);
          for (int bundle = 0; bundle < order.bundles; ++bundle)
            list[base + tiles_before[begin] * order.bundles + index_in_section(order, keys[k], rank, index, bundle)] = {
                static_cast<int32_t>(first) + sequence_of_key(keys[k]),
                tile_of_rank(order, tiles_of_key(keys[k]), rank), bundle * order.bundle_heads, tiles_of_key(keys[k])};
        }
    }
  }
  return list;
}

}  // namespace flash_ext
