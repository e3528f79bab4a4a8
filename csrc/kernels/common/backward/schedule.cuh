// What a CTA of the backward computes first: its key tile, and its share of the query tiles that see it.
#pragma once

#include <algorithm>

#include "kernels/common/scheduler/work_list.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/ptx/grid_dependency.h"
#include "order.h"

namespace flash_ext {

/// The schedule of a call. Its list and sums lie in scratch memory, after the other memory that the call needs.
struct BackwardSchedule {
  BackwardOrder order;
  WorkListPlan listing;   // of the key tiles
  WorkList list;          // null: `order` alone locates tiles
  int64_t tiles;          // upper bound on the key tiles
  int64_t slot_elements;  // dK and dV of a tile of keys
  float* sums;            // (slots, slot_elements): dK and dV of the splits
  int64_t bytes;

  /// `last_keys_first`: the last keys of all heads come first, for CTAs of sm80 that add to dQ in turns.
  BackwardSchedule(const BackwardParams& p, int block_n, int head_dim, bool last_keys_first, void* memory)
      : order(backward_order(p.batch, p.heads_q, p.heads_kv, p.seqlen_k, block_n, p.schedule, last_keys_first)),
        listing(list_tiles(p, order, block_n)),
        list(listing.view(memory)),
        tiles(listing.listed ? listing.max_work_tiles() : int64_t{order.key_tiles} * order.heads),
        slot_elements(int64_t{2} * block_n * head_dim) {
    const int64_t list_bytes = (listing.bytes() + 127) / 128 * 128;
    sums = reinterpret_cast<float*>(static_cast<char*>(memory) + list_bytes);
    bytes =
        list_bytes + order.split_tiles(tiles) * order.splits() * slot_elements * static_cast<int64_t>(sizeof(float));
  }

  int64_t positions() const { return order.positions(tiles); }

  __device__ __forceinline__ KeyWorkTile tile_at(uint32_t tile_position) const {
    if (!list) return order.tile_at(tile_position);
    const TileIndex tile = list.locate(static_cast<int>(tile_position));
    if (tile.tile == kNoTile) return {0, 0, KeyWorkTile::kPast};
    return {tile.sequence, tile.head, tile.tile};
  }
  __device__ __forceinline__ KeyWorkTile locate(uint32_t position) const {
    if (list) ptx::wait_for_previous_grid();  // it has listed the tiles
    return order.split_at(tile_at(order.tile_position(position)), position);
  }

 private:
  static WorkListPlan list_tiles(const BackwardParams& p, const BackwardOrder& order, int block_n) {
    WorkListPlan plan = backward_work_list(p, block_n, order.last_keys_first);
    // Each split of a tile has a slot, whether the tile exists or not. A list saves the slots of tiles that do not
    // exist.
    const bool has_spare = plan.most_tiles < int64_t{order.key_tiles} * p.batch;
    plan.listed = plan.listed || (order.splits() > 1 && has_spare);
    return plan;
  }
};

/// Queries that an anchored key tile skips are a multiple of so many: row terms of 16 queries are permuted
/// (term_position), sums of dQ^T lie in fragments of 8.
constexpr int kSkippedQueries = 16;

/// A key tile, and the query tiles that see some of it. kAnchored: `sequence` begins at the first query that sees some
/// of it, rounded down to a multiple of kSkippedQueries.
template <int kBlockM, int kBlockN, bool kAnchored = false>
struct KeyTile {
  Sequence sequence;  // its head is the first of the group
  int first_key;
  int skipped;     // queries left out before the first of `sequence`
  TileSpan tiles;  // of queries; full: they see all keys that are there

  __device__ __forceinline__ KeyTile(const BackwardParams& p, const BackwardOrder& order, const KeyWorkTile& work_tile)
      : sequence(p, work_tile.batch, work_tile.head_kv * order.group),
        first_key(work_tile.tile * kBlockN),
        skipped(kAnchored ? skip_queries() : 0),
        tiles(sequence.query_tiles<kBlockM>(first_key, min(first_key + kBlockN, sequence.seqlen_k))) {}

  __device__ __forceinline__ bool exists() const { return first_key < sequence.seqlen_k; }

 private:
  __device__ __forceinline__ int skip_queries() {
    const int count = min(sequence.queries_begin(first_key), sequence.seqlen_q) / kSkippedQueries * kSkippedQueries;
    sequence.skip_queries(count);
    return count;
  }
};

/// What a CTA computes: all of a key tile, or a split of it.
template <int kBlockM, int kBlockN, bool kAnchored = false>
struct BackwardTask : KeyTile<kBlockM, kBlockN, kAnchored> {
  using Base = KeyTile<kBlockM, kBlockN, kAnchored>;
  using Base::sequence;  // its head is the first that the CTA visits
  using Base::tiles;
  int heads;  // that the CTA visits; 0: the tile has fewer splits
  int slot;   // of a split's sums

  __device__ __forceinline__ BackwardTask(const BackwardParams& p, const BackwardSchedule& schedule,
                                          const KeyWorkTile& work_tile)
      : Base(p, schedule.order, work_tile) {
    const QueryShare share = schedule.order.share(work_tile, tiles.begin, tiles.end);
    sequence.head += share.first_head;
    tiles.begin = share.begin, tiles.end = share.end;
    heads = share.heads;
    slot = share.unsplit ? KeyWorkTile::kUnsplit : work_tile.slot;
  }

  __device__ __forceinline__ bool exists() const { return Base::exists() && heads > 0; }

  /// Where a split stores its dK, followed by its dV; null if dK and dV are complete.
  __device__ __forceinline__ float* sums(const BackwardSchedule& schedule) const {
    return slot == KeyWorkTile::kUnsplit ? nullptr : schedule.sums + slot * schedule.slot_elements;
  }
};

}  // namespace flash_ext
