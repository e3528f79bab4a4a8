// Block lists of masks in which each query sees the first keys and an interval of keys: windows with sinks, documents,
// prefixes, spans.
//
// Two neighbouring blocks of a row differ only where the interval of one of the row's queries begins or ends in one of
// them or at its edge. Between such columns all blocks are alike: a run. A run is hidden, or full, or all its blocks
// share a bitmap. Two passes go over the runs of a row: the first counts its blocks, which makes the offsets, the
// second writes its entries and bitmaps.
#pragma once

#include <cstdint>

#include "kernels/common/block_lists/lanes.h"

namespace flash_ext {

/// What says, together with the window, where intervals begin and end.
enum class IntervalRule : int32_t {
  kWindow,     // nothing; num_global tokens
  kDocuments,  // bounds (num_bounds): tokens see their own document; those outside of all, nothing
  kPrefix,     // bounds (batch): how many of the first keys all see
  kSpans,      // bounds (batch, num_bounds, 2): tokens of a span see up to its end
};

/// Query i is at position i + offset. The window of position p are the keys p - left ... p + right.
struct IntervalListsParams {
  IntervalRule rule = IntervalRule::kWindow;
  const void* bounds = nullptr;
  bool bounds_are_int64 = false;  // else int32
  int64_t num_bounds = 0;
  int64_t batch = 1;  // of the lists
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int32_t block_m = 0;
  int32_t block_n = 0;  // a multiple of 32
  int64_t offset = 0;
  int64_t left = -1;  // negative: unlimited
  int64_t right = -1;
  int64_t num_global = 0;  // all see so many first keys; unless `causal`, tokens at the first positions see all keys
  bool causal = false;     // first keys after the window are not seen either
  int32_t rows = 0;        // of blocks; batch * (rows + 1) is counted in 32 bits
  int32_t columns = 0;
  int64_t max_blocks = 0;      // entries that the lists have room for
  int32_t max_bitmaps = 0;     // bitmaps that a row has room for, at least 1; those of all rows are counted in 32 bits
  int32_t* offsets = nullptr;  // (batch, rows + 1)
  int32_t* indices = nullptr;  // (max_blocks)
  int32_t* bitmap_ids = nullptr;  // (max_blocks)
  int32_t* bitmaps = nullptr;     // (batch * rows * max_bitmaps, block_m, block_n / 32)
};

/// A query sees the keys [0, before) and [begin, end); begin > before, or before is 0. An end past the last key is
/// moved to the end of that key's block, so that bits past the last key do not keep the block from being full.
struct VisibleKeys {
  int before, begin, end;
};

/// A row of blocks, and which spans may have queries in it: [first_span, last_span).
struct BlockRow {
  int batch, row;
  int first_span, last_span;
};

/// Blocks that are alike, up to the column `end`.
struct Run {
  int end;
  bool is_seen, is_full;
};

FLASH_EXT_LANES_CODE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FLASH_EXT_LANES_CODE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

FLASH_EXT_LANES_CODE int64_t bound(const IntervalListsParams& p, int64_t n) {
  return p.bounds_are_int64 ? static_cast<const int64_t*>(p.bounds)[n] : static_cast<const int32_t*>(p.bounds)[n];
}

/// Finds a range that includes every span of the batch entry with queries of a row. Spans may have any order.
FLASH_EXT_LANES_CODE BlockRow block_row(const IntervalListsParams& p, int number, const Lanes& lanes) {
  BlockRow at = {number / p.rows, number % p.rows, 0, 0};
  if (p.rule != IntervalRule::kSpans) return at;
  const int count = static_cast<int>(p.num_bounds);
  const int64_t first = int64_t{at.row} * p.block_m + p.offset, end = first + p.block_m;
  int first_span = count, before_last = 0;
  for (int span = lanes.index; span < count; span += Lanes::kCount) {
    const int64_t place = (int64_t{at.batch} * count + span) * 2;
    if (bound(p, place) >= end || bound(p, place + 1) <= first) continue;
    if (span < first_span) first_span = span;
    before_last = -span - 1;
  }
  at.first_span = lanes.min(first_span);
  at.last_span = -lanes.min(before_last);
  return at;
}

/// How many bounds are at or before a position; they ascend.
FLASH_EXT_LANES_CODE int64_t bounds_up_to(const IntervalListsParams& p, int64_t position) {
  int64_t low = 0, high = p.num_bounds;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (bound(p, middle) <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// The end of the span that a position is in, or 0.
FLASH_EXT_LANES_CODE int64_t end_of_span(const IntervalListsParams& p, const BlockRow& at, int64_t position) {
  int64_t end = 0;
  for (int span = at.first_span; span < at.last_span; ++span) {
    const int64_t place = (at.batch * p.num_bounds + span) * 2;
    if (bound(p, place) <= position && position < bound(p, place + 1)) end = larger(end, bound(p, place + 1));
  }
  return end;
}

/// [0, before) and [begin, end) as `VisibleKeys`.
FLASH_EXT_LANES_CODE VisibleKeys visible_keys(const IntervalListsParams& p, int64_t before, int64_t begin,
                                              int64_t end) {
  const auto within = [&](int64_t key) {
    return key >= p.seqlen_k ? p.columns * p.block_n : static_cast<int>(larger(key, 0));
  };
  const int from = within(begin), to = within(end), first = within(before);
  if (from <= first) return {0, 0, to < first ? first : to};
  if (from >= to) return {0, 0, first};
  return {first, from, to};
}

/// The keys that query i of a row of blocks sees. Queries past the last one see what the last one sees.
FLASH_EXT_LANES_CODE VisibleKeys visible_keys(const IntervalListsParams& p, const BlockRow& at, int i) {
  const int64_t position = smaller(int64_t{at.row} * p.block_m + i, p.seqlen_q - 1) + p.offset;
  int64_t before = 0;
  int64_t begin = p.left < 0 ? 0 : position - p.left;
  int64_t end = p.right < 0 ? p.seqlen_k : position + p.right + 1;
  switch (p.rule) {
    case IntervalRule::kWindow:
      if (p.num_global == 0) break;
      if (!p.causal && position >= 0 && position < p.num_global) return visible_keys(p, 0, 0, p.seqlen_k);
      before = p.causal ? smaller(p.num_global, end) : p.num_global;
      break;
    case IntervalRule::kDocuments: {
      const int64_t document = bounds_up_to(p, position);
      if (document == 0 || document == p.num_bounds) return {0, 0, 0};
      begin = larger(begin, bound(p, document - 1));
      end = smaller(end, bound(p, document));
      break;
    }
    case IntervalRule::kPrefix:
      before = bound(p, at.batch);
      break;
    case IntervalRule::kSpans:
      end = larger(end, end_of_span(p, at, position));
      break;
  }
  return visible_keys(p, before, begin, end);
}

/// Bit b: whether key + b is seen.
FLASH_EXT_LANES_CODE uint32_t visible_bits(const VisibleKeys& keys, int key) {
  const auto below = [&](int end) { return end <= key ? 0u : end - key >= 32 ? ~0u : (1u << (end - key)) - 1u; };
  return below(keys.before) | (below(keys.end) & ~below(keys.begin));
}

/// The first column after `column` at which, because of an edge, blocks may differ from the block before.
FLASH_EXT_LANES_CODE int next_change(int edge, int column, int block_n, int columns) {
  const int holds = edge / block_n, after = (edge % block_n == 0) ? holds : holds + 1;
  return holds > column ? holds : after > column ? after : columns;
}

/// The run that begins at a column.
FLASH_EXT_LANES_CODE Run run_from(const IntervalListsParams& p, const BlockRow& at, int column, const Lanes& lanes) {
  int end = p.columns;
  bool is_seen = false, is_full = true;
  for (int i = lanes.index; i < p.block_m; i += Lanes::kCount) {
    const VisibleKeys keys = visible_keys(p, at, i);
    const int edges[] = {keys.before, keys.begin, keys.end};
    for (const int edge : edges) {
      const int change = next_change(edge, column, p.block_n, p.columns);
      if (change < end) end = change;
    }
    for (int key = 0; key < p.block_n; key += 32) {
      const uint32_t bits = visible_bits(keys, column * p.block_n + key);
      is_seen = is_seen || bits != 0;
      is_full = is_full && bits == ~0u;
    }
  }
  return {lanes.min(end), lanes.any(is_seen), lanes.all(is_full)};
}

/// The index of a row's offset. `number` counts the rows of all batch entries.
FLASH_EXT_LANES_CODE int64_t place_of_offset(const IntervalListsParams& p, int number) {
  return int64_t{number} + number / p.rows;
}

/// First pass: writes the number of blocks of a row in the place of its offset.
FLASH_EXT_LANES_CODE void count_blocks(const IntervalListsParams& p, int number, const Lanes& lanes) {
  const BlockRow at = block_row(p, number, lanes);
  int count = 0;
  for (int column = 0; column < p.columns;) {
    const Run run = run_from(p, at, column, lanes);
    if (run.is_seen) count += run.end - column;
    column = run.end;
  }
  if (lanes.index == 0) p.offsets[place_of_offset(p, number)] = count;
}

FLASH_EXT_LANES_CODE void write_bitmap(const IntervalListsParams& p, const BlockRow& at, int column, int64_t bitmap,
                                       const Lanes& lanes) {
  const int words = p.block_n / 32;
  for (int i = lanes.index; i < p.block_m; i += Lanes::kCount) {
    const VisibleKeys keys = visible_keys(p, at, i);
    int32_t* const row = p.bitmaps + (bitmap * p.block_m + i) * words;
    for (int word = 0; word < words; ++word)
      row[word] = static_cast<int32_t>(visible_bits(keys, column * p.block_n + 32 * word));
  }
}

/// Writes the entries of a run, from number `entry` on, as far as there is room.
FLASH_EXT_LANES_CODE void write_entries(const IntervalListsParams& p, int64_t entry, int column, int end, int bitmap_id,
                                        const Lanes& lanes) {
  const int count = static_cast<int>(smaller(end - column, p.max_blocks - entry));
  for (int n = lanes.index; n < count; n += Lanes::kCount) {
    p.indices[entry + n] = column + n;
    p.bitmap_ids[entry + n] = bitmap_id;
  }
}

/// Zeroes the bitmaps [begin, end), which no block has.
FLASH_EXT_LANES_CODE void zero_bitmaps(const IntervalListsParams& p, int begin, int end, const Lanes& lanes) {
  const int64_t words = int64_t{p.block_m} * (p.block_n / 32);
  for (int64_t word = begin * words + lanes.index; word < end * words; word += Lanes::kCount) p.bitmaps[word] = 0;
}

/// Second pass: writes the entries and the bitmaps of a row. There are more bitmaps than room only if bounds do not
/// ascend: blocks then share the last one.
FLASH_EXT_LANES_CODE void write_blocks(const IntervalListsParams& p, int number, const Lanes& lanes) {
  const BlockRow at = block_row(p, number, lanes);
  int bitmap = number * p.max_bitmaps;
  const int end_of_bitmaps = bitmap + p.max_bitmaps;
  int64_t entry = p.offsets[place_of_offset(p, number)];
  for (int column = 0; column < p.columns;) {
    const Run run = run_from(p, at, column, lanes);
    if (run.is_seen) {
      const bool has_room = bitmap < end_of_bitmaps;
      if (!run.is_full && has_room) write_bitmap(p, at, column, bitmap, lanes);
      write_entries(p, entry, column, run.end, run.is_full ? -1 : has_room ? bitmap : bitmap - 1, lanes);
      entry += run.end - column;
      if (!run.is_full && has_room) ++bitmap;
    }
    column = run.end;
  }
  zero_bitmaps(p, bitmap, end_of_bitmaps, lanes);
}

}  // namespace flash_ext
