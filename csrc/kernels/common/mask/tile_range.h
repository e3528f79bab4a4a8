// The key tiles that a query tile visits under a window, and which of them are full, so that they need no mask.
//
// Query i sees key j when  i + offset - left <= j <= i + offset + right. The keys that *some* query of [i0, i1) sees
// and the keys that *every* query of it sees are both intervals, so the tiles to visit are a range with a sub-range of
// full tiles:  begin <= full_begin <= full_end <= end;   [begin, full_begin) and [full_end, end) are partial.
// Swapping the roles (`transposed`) gives the queries that see a tile of keys.
#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"

namespace flash_ext {

/// The window of one sequence; negative left or right = unlimited.
struct Window {
  int64_t left = -1;
  int64_t right = -1;
  int64_t offset = 0;
};

struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
};

/// In units of tiles.
struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t full_begin = 0;
  int64_t full_end = 0;
};

FLASH_EXT_HOST_DEVICE int64_t clamp_index(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

/// The window of a sequence. Sides that reach past the sequence are shortened, so that no later sum overflows.
FLASH_EXT_HOST_DEVICE Window make_window(int64_t left, int64_t right, bool top_left, int64_t seqlen_q,
                                         int64_t seqlen_k) {
  const int64_t reach = seqlen_q + seqlen_k;
  return {left > reach ? reach : left, right > reach ? reach : right, top_left ? 0 : seqlen_k - seqlen_q};
}

/// The window as a key sees the queries.
FLASH_EXT_HOST_DEVICE Window transposed(const Window& window) { return {window.right, window.left, -window.offset}; }

/// Keys that at least one query of [i0, i1) sees; empty is {0, 0}.
FLASH_EXT_HOST_DEVICE Interval visible_keys(int64_t i0, int64_t i1, int64_t seqlen_k, const Window& window) {
  if (i0 >= i1) return {0, 0};
  const int64_t begin = window.left < 0 ? 0 : clamp_index(i0 + window.offset - window.left, 0, seqlen_k);
  const int64_t end = window.right < 0 ? seqlen_k : clamp_index(i1 + window.offset + window.right, 0, seqlen_k);
  return begin < end ? Interval{begin, end} : Interval{0, 0};
}

/// Keys that every query of [i0, i1) sees; empty is {0, 0}.
FLASH_EXT_HOST_DEVICE Interval common_keys(int64_t i0, int64_t i1, int64_t seqlen_k, const Window& window) {
  if (i0 >= i1) return {0, 0};
  const int64_t begin = window.left < 0 ? 0 : clamp_index(i1 - 1 + window.offset - window.left, 0, seqlen_k);
  const int64_t end = window.right < 0 ? seqlen_k : clamp_index(i0 + 1 + window.offset + window.right, 0, seqlen_k);
  return begin < end ? Interval{begin, end} : Interval{0, 0};
}

/// Tiles of block_n keys for the queries [i0, i1). A tile that seqlen_k cuts is partial. Empty is {0, 0, 0, 0};
/// with no full tile full_begin == full_end.
FLASH_EXT_HOST_DEVICE TileRange tile_range(int64_t i0, int64_t i1, int64_t seqlen_k, const Window& window,
                                           int64_t block_n) {
  const Interval some = visible_keys(i0, i1, seqlen_k, window);
  const Interval every = common_keys(i0, i1, seqlen_k, window);
  TileRange range;
  if (some.begin == some.end) return range;
  range.begin = some.begin / block_n;
  range.end = (some.end + block_n - 1) / block_n;
  range.full_begin = clamp_index((every.begin + block_n - 1) / block_n, range.begin, range.end);
  range.full_end = clamp_index(every.end / block_n, range.full_begin, range.end);
  return range;
}

}  // namespace flash_ext
