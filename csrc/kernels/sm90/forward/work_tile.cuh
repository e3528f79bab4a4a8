// A work tile: queries of one head, and the tiles of keys that they see.
#pragma once

#include <algorithm>

#include "config.h"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "tile_order.h"

namespace flash_ext::sm90 {

/// Where a work tile stores its partial result, if it has only a split of the keys that its queries see (split_kv.cuh).
template <bool kSplitsKv>
struct WorkTileSplit {
  float4* partial = nullptr;
};
template <>
struct WorkTileSplit<false> {
  static constexpr float4* partial = nullptr;
};

/// The entries of a block mask's lists that a work tile visits: [first_entry, first_entry + blocks).
template <bool kListsBlocks>
struct WorkTileBlocks {};
template <>
struct WorkTileBlocks<true> {
  int first_entry, blocks;
};

/// What score options (softcap, ALiBi) add to a work tile. Without them, the last key tile is visited first.
template <bool kScoreOptions>
struct WorkTileOptions {
  __device__ __forceinline__ void set(const AttentionParams&, const Sequence&, int) {}
  __device__ __forceinline__ int first_tile(const TileSpan& tiles) const { return tiles.end - 1; }
};

template <>
struct WorkTileOptions<true> {
  int tile;
  float slope;  // of ALiBi, base 2

  __device__ __forceinline__ void set(const AttentionParams& p, const Sequence& sequence, int first) {
    tile = first;
    slope = p.alibi_slopes ? p.alibi_slopes[sequence.batch * p.alibi_batch_stride + sequence.head] * kLog2E : 0.0f;
  }
  __device__ __forceinline__ int first_tile(const TileSpan&) const { return tile; }
};

/// A query tile of one head, and the key tiles that it sees. Key tiles are visited from first_tile() down to
/// `tiles.begin`, and then from the last one down to the one after first_tile().
template <class Config>
struct ForwardWorkTile : WorkTileOptions<Config::kScoreOptions>,
                         WorkTileSplit<Config::kSplitsKv>,
                         WorkTileBlocks<Config::kListsBlocks> {
  Sequence sequence;
  int first_query, end_query;
  TileSpan tiles;                      // of all rows: these are loaded
  TileSpan rows[Config::kWarpgroups];  // of the rows of each warpgroup, within `tiles`
  // Key tiles [fixed_max_begin, fixed_max_end) take steps with a fixed row max: every row of the warpgroup sees all
  // their keys. It has seen a key earlier, and so has a stabiliser.
  int fixed_max_end[Config::kWarpgroups], fixed_max_begin[Config::kWarpgroups];

  int tail_tile;  // the tile that loads rows of K and V past the sequence; -1 = none
  // A work tile that failed is recomputed with V sanitised and everything else as before, so that hidden values change
  // no bit. If sums overflowed, or if it fails again, it runs on the safe path, with the running maximum.
  bool sanitised, safe_path;
  bool failed, overflowed;  // set by any warp
  bool met_non_finite;      // in V; written before its v_full

  /// Sets everything but the key tiles.
  __device__ __forceinline__ ForwardWorkTile(const Sequence& sequence, int first_query, int end_query)
      : sequence(sequence),
        first_query(first_query),
        end_query(end_query),
        sanitised(false),
        safe_path(false),
        failed(false),
        overflowed(false),
        met_non_finite(false) {}

  /// Sets the key tiles. `seen`: the tiles that any query sees. tail_in_memory: memory has rows after the sequence's
  /// end, which the last tile loads.
  __device__ __forceinline__ void set_tiles(const AttentionParams& p, const TileSpan& seen, bool tail_in_memory) {
    tiles = seen;
    tail_tile = tail_in_memory && seen.end * Config::kBlockN > sequence.seqlen_k ? seen.end - 1 : -1;
    // ALiBi is largest on the diagonal of the last row. Starting there, stabilisers need not rise later.
    const int diagonal = max(end_query - 1 + sequence.offset, 0) / Config::kBlockN;
    this->set(p, sequence, p.alibi_slopes ? min(max(diagonal, seen.begin), seen.end - 1) : seen.end - 1);
  }

  /// Sets the key tiles of warpgroup g, whose rows begin at `first` and see `seen`. all_begin: the first tile that any
  /// row of the work tile sees.
  __device__ __forceinline__ void set_rows(const AttentionParams& p, int g, int first, const TileSpan& seen,
                                           int all_begin) {
    const bool none = seen.begin == seen.end;
    rows[g] = {none ? all_begin : seen.begin, none ? all_begin : seen.end, seen.full_begin, seen.full_end};
    // If the first row sees a key of the tile after the full ones, all rows do.
    int fixed_end = sequence.keys_end(first) > seen.full_end * Config::kBlockN ? seen.full_end : seen.full_end - 1;
    // With ALiBi scores rise towards the diagonal of the first row.
    if (Config::kScoreOptions && p.alibi_slopes)
      fixed_end = min(fixed_end, max(first + sequence.offset, 0) / Config::kBlockN);
    fixed_max_end[g] = fixed_end;
    fixed_max_begin[g] = max(seen.full_begin, rows[g].begin + (Config::kUpdatesRowMaxInLast ? 1 : 0));
  }

  /// The first query of a query tile. The partial tile stands last in the variants whose masks come in groups of 64
  /// queries; in the others see first_query_of_tile().
  __device__ __forceinline__ static int first_query_of(int block, int blocks, int seqlen_q) {
    if (Config::kVisible || Config::kListsBlocks) return min(block * Config::kBlockM, seqlen_q);
    return first_query_of_tile(block, blocks, seqlen_q, Config::kBlockM);
  }

  __device__ __forceinline__ int first_tile() const {
    return WorkTileOptions<Config::kScoreOptions>::first_tile(tiles);
  }

  /// The key tile of a rank in [tiles.begin, tiles.end). Ranks are visited from the last one down.
  __device__ __forceinline__ int tile_at(int rank) const {
    if (!Config::kScoreOptions) return rank;
    const int tile = rank - (tiles.end - 1 - first_tile());
    return tile < tiles.begin ? tile + tiles.end - tiles.begin : tile;
  }

  /// The last tile that a warpgroup visits.
  __device__ __forceinline__ int last_tile(int group) const {
    const TileSpan& seen = rows[group];
    if (!Config::kScoreOptions || seen.end <= first_tile() + 1) return seen.begin;
    return max(seen.begin, first_tile() + 1);
  }

  /// Returns the last tile of the run from `tile` downwards, no further than `stop`, in which a warpgroup keeps its row
  /// max: all its rows see all of these tiles and have stabilisers. In the second part of the visits, past the
  /// diagonal, rows have stabilisers if the first part had a full tile. Returns tile + 1 if the run is empty.
  __device__ __forceinline__ int fixed_max_from(int group, int tile, int stop) const {
    const TileSpan& seen = rows[group];
    const bool wrapped = tile > first_tile();
    const int end = wrapped ? (seen.full_begin <= first_tile() ? seen.full_end : 0) : fixed_max_end[group];
    const int begin = max(wrapped ? seen.full_begin : fixed_max_begin[group], stop);
    return safe_path || tile >= end ? tile + 1 : min(begin, tile + 1);
  }

  /// Sets the key tiles with kListsBlocks: `tiles` counts along the list. All count as full here; ListedKeys says which
  /// have a bitmap.
  __device__ __forceinline__ void list_blocks(int first_entry, int blocks, int tiles_of_block) {
    this->first_entry = first_entry;
    this->blocks = blocks;
    tiles = {0, blocks * tiles_of_block, 0, blocks * tiles_of_block};
#pragma unroll 1
    for (int g = 0; g < Config::kWarpgroups; ++g)
      rows[g] = first_query + g * kWarpgroupRows < end_query ? tiles : TileSpan{0, 0, 0, 0};
  }

  /// Drops the tiles outside of [begin, end).
  __device__ __forceinline__ void keep_tiles(int begin, int end) {
    const auto keep = [=](TileSpan& span) {
      span.begin = min(max(span.begin, begin), end);
      span.end = min(max(span.end, begin), end);
    };
    keep(tiles);
#pragma unroll 1
    for (int g = 0; g < Config::kWarpgroups; ++g) keep(rows[g]);
  }

  __device__ __forceinline__ bool has_rows(int group) const { return rows[group].begin < rows[group].end; }

  /// Whether a warpgroup arrives at out_full.
  __device__ __forceinline__ bool publishes(int group) const {
    return Config::kQuerySlots == 1 ? copies_out(group) : has_rows(group);
  }

  /// Whether out of a warpgroup leaves through shared memory: only if it has all its 64 rows.
  __device__ __forceinline__ bool copies_out(int group) const {
    return Config::kOutInShared && !this->partial && first_query + (group + 1) * kWarpgroupRows <= end_query &&
           has_rows(group);
  }

  /// Whether one more stage of K and one of V, for out, follow the key tiles.
  __device__ __forceinline__ bool has_out_slots() const { return Config::kOutInRings && tiles.begin < tiles.end; }

  /// Whether V of the tile is sanitised: the tail tile always; after a failure every tile that some row does not see in
  /// full.
  __device__ __forceinline__ bool is_sanitised(int tile) const {
    if constexpr (Config::kListsBlocks) return sanitised;
    return sanitised ? tile < tiles.full_begin || tile >= tiles.full_end : tile == tail_tile;
  }

  /// Prepares a failed work tile for its recomputation.
  __device__ __forceinline__ void requeue() {
    safe_path = overflowed || sanitised;
    sanitised = true;
    failed = overflowed = met_non_finite = false;
  }
};

}  // namespace flash_ext::sm90
