// The order in which CTAs of the backward take key tiles, and how several CTAs share one. Host and device share it: the
// kernels, the plan, and the tests that simulate a schedule.
//
// Without a causal mask, the tiles of one head stand side by side, so that its queries stay in L2. With a causal mask,
// the tiles of all heads of a section do, and the first keys come first: they have the most queries, so no long CTA
// comes last.
//
// Where there are too few key tiles for the SMs, a tile is split. Each split visits some heads of the group and some of
// the query tiles, and stores its dK and dV in float in a slot of scratch memory. A kernel after the main one adds the
// slots up in the order of the splits (split_sums.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/params.h"

namespace flash_ext {

/// The work tile of a CTA: a key tile of a key head, or one split of it.
struct KeyWorkTile {
  static constexpr int32_t kUnsplit = -1;
  static constexpr int32_t kPast = 1 << 23;  // a tile past all keys

  int32_t batch, head_kv, tile;
  int32_t split = 0;
  int32_t slot = kUnsplit;  // of the split's sums
};

/// The query heads of a group, counted from its first, and the query tiles that a CTA visits.
struct QueryShare {
  int32_t first_head, heads;  // no heads: a tile that few queries see has fewer splits
  int32_t begin, end;
  bool unsplit;  // the CTA visits all queries of the tile, so dK and dV are complete
};

/// The order of key tiles. Its positions number CTAs, or clusters of CTAs.
struct BackwardOrder {
  uint32_t key_tiles = 0;      // of the longest sequence
  uint32_t heads = 0;          // key heads of all batch entries
  uint32_t heads_kv = 1;       // key heads of one batch entry
  uint32_t section_heads = 1;  // heads whose tiles stand side by side
  bool last_keys_first = false;
  int32_t group = 1;           // query heads of a key head
  uint32_t unsplit_tiles = 0;  // so many tiles, the first in the order, are not split
  int32_t head_splits = 1;     // divides the group
  int32_t query_splits = 1;

  FLASH_EXT_HOST_DEVICE_MEMBER uint32_t splits() const { return static_cast<uint32_t>(head_splits * query_splits); }
  FLASH_EXT_HOST_DEVICE_MEMBER bool is_unsplit(uint32_t position) const { return position < unsplit_tiles; }

  /// For the CTA at a position: the position of its tile in the order of tiles; that tile; its split of the tile.
  FLASH_EXT_HOST_DEVICE_MEMBER uint32_t tile_position(uint32_t position) const {
    return is_unsplit(position) ? position : unsplit_tiles + (position - unsplit_tiles) / splits();
  }
  FLASH_EXT_HOST_DEVICE_MEMBER KeyWorkTile tile_at(uint32_t tile_position) const {
    const uint32_t section_size = section_heads * key_tiles;
    const uint32_t section = tile_position / section_size, rest = tile_position % section_size;
    const uint32_t first_head = section * section_heads, left = heads - first_head;
    const uint32_t width = section_heads < left ? section_heads : left;
    const uint32_t rank = rest / width, head = first_head + rest % width;
    return {static_cast<int32_t>(head / heads_kv), static_cast<int32_t>(head % heads_kv),
            static_cast<int32_t>(last_keys_first ? key_tiles - 1 - rank : rank)};
  }
  FLASH_EXT_HOST_DEVICE_MEMBER KeyWorkTile split_at(KeyWorkTile tile, uint32_t position) const {
    if (is_unsplit(position)) return tile;
    const uint32_t slot = position - unsplit_tiles;
    tile.slot = static_cast<int32_t>(slot);
    tile.split = static_cast<int32_t>(slot % splits());
    return tile;
  }
  FLASH_EXT_HOST_DEVICE_MEMBER KeyWorkTile locate(uint32_t position) const {
    return split_at(tile_at(tile_position(position)), position);
  }

  /// The number of splits along the queries of a key tile with so many query tiles. No split is empty.
  FLASH_EXT_HOST_DEVICE_MEMBER int32_t query_splits_of(int32_t tiles) const {
    return tiles >= query_splits ? query_splits : tiles > 1 ? tiles : 1;
  }
  /// The number of slots of a split tile. If it is 1, the CTA has all of the tile, and uses no slot.
  FLASH_EXT_HOST_DEVICE_MEMBER int32_t splits_of(int32_t tiles) const { return head_splits * query_splits_of(tiles); }

  /// The share that the CTA of `work_tile` has of a key tile with the query tiles [begin, end).
  FLASH_EXT_HOST_DEVICE_MEMBER QueryShare share(const KeyWorkTile& work_tile, int32_t begin, int32_t end) const {
    if (work_tile.slot == KeyWorkTile::kUnsplit) return {0, group, begin, end, true};
    const int32_t tiles = end - begin, splits = query_splits_of(tiles), split = work_tile.split / head_splits;
    if (split >= splits) return {0, 0, begin, begin, false};
    const int32_t shared_heads = group / head_splits;
    return {work_tile.split % head_splits * shared_heads, shared_heads, begin + tiles * split / splits,
            begin + tiles * (split + 1) / splits, splits_of(tiles) == 1};
  }

  /// The number of positions for so many key tiles.
  int64_t positions(int64_t tiles) const { return tiles + split_tiles(tiles) * (splits() - 1); }
  int64_t split_tiles(int64_t tiles) const { return splits() == 1 ? 0 : std::max<int64_t>(tiles - unsplit_tiles, 0); }
};

inline BackwardOrder backward_order(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_k, int64_t block_n,
                                    const KeyTileSchedule& schedule, bool last_keys_first) {
  const int64_t heads = batch * heads_kv;
  const int64_t together = last_keys_first ? std::max<int64_t>(heads, 1) : schedule.section_heads;
  const int64_t sections = std::max<int64_t>(heads / together, 1);  // no last section of a few heads: SMs would be idle
  BackwardOrder order;
  order.key_tiles = static_cast<uint32_t>((seqlen_k + block_n - 1) / block_n);
  order.heads = static_cast<uint32_t>(heads);
  order.heads_kv = static_cast<uint32_t>(heads_kv);
  order.section_heads = static_cast<uint32_t>(std::max<int64_t>((heads + sections - 1) / sections, 1));
  order.last_keys_first = last_keys_first;
  order.group = static_cast<int32_t>(heads_q / heads_kv);
  order.head_splits = static_cast<int32_t>(schedule.head_splits);
  order.query_splits = static_cast<int32_t>(schedule.query_splits);
  order.unsplit_tiles = order.splits() == 1 ? UINT32_MAX : static_cast<uint32_t>(schedule.unsplit_tiles);
  return order;
}

/// The number of a key head among those of all batch entries.
FLASH_EXT_HOST_DEVICE int32_t key_head_of_all(int64_t heads_kv, int32_t batch, int32_t head_kv) {
  return batch * static_cast<int32_t>(heads_kv) + head_kv;
}

/// Which positions zero which sums of dQ (dq_zeroing.cuh). The sums of a key head have a share for each of its key
/// tiles; a position zeroes the share of the position `distance` after it.
struct DqZeroingOrder {
  uint32_t first_head = UINT32_MAX;  // of the key heads of all batch entries; those before it are zeroed beforehand
  uint32_t distance = 0;             // in positions; 0: all sums are zeroed beforehand
  BackwardOrder order;               // that of the call; it has no splits

  FLASH_EXT_HOST_DEVICE_MEMBER bool is_used() const { return distance > 0; }
  FLASH_EXT_HOST_DEVICE_MEMBER int32_t key_head(int32_t batch, int32_t head_kv) const {
    return key_head_of_all(order.heads_kv, batch, head_kv);
  }
  FLASH_EXT_HOST_DEVICE_MEMBER bool covers(int32_t key_head) const {
    return static_cast<uint32_t>(key_head) >= first_head;
  }
  /// The position whose share is zeroed at `position`, unless it is past the last one or its key head is not covered.
  FLASH_EXT_HOST_DEVICE_MEMBER uint32_t target(uint32_t position) const { return position + distance; }
  FLASH_EXT_HOST_DEVICE_MEMBER bool is_past(uint32_t position) const {
    return position >= order.heads * order.key_tiles;
  }
};

/// `at_once`: positions that run at the same time. `reserved`: the first positions, which zero nothing.
inline DqZeroingOrder dq_zeroing_order(const BackwardOrder& order, int64_t at_once, int64_t reserved) {
  // A section and a wave: when the first position of a section adds to dQ, those that zeroed its sums are mostly over.
  // The first heads are all of the sections in which some share is not that far after a position that zeroes.
  const int64_t section = int64_t{order.section_heads} * order.key_tiles;
  const int64_t first_head = (1 + (at_once + reserved + section - 1) / section) * order.section_heads;
  if (first_head >= order.heads) return {};
  return {static_cast<uint32_t>(first_head), static_cast<uint32_t>(section + at_once), order};
}

}  // namespace flash_ext
