// The key tiles that the producer loads for a work tile: the tiles of its range, which may lie in a cache, or the tiles
// of a block mask's list. Ranks number them against the order of the visits: the producer counts down to begin().
#pragma once

#include "kernels/common/divisor.h"
#include "work_tile.cuh"

namespace flash_ext::sm90 {

/// The key tiles of a range, in the order of the visits.
template <class Config>
class RangeTiles {
 public:
  // The next work tile is taken when kTilesAhead + 1 key tiles of this one are still to be loaded. Taking it earlier
  // spreads work tiles less evenly over CTAs; taking it later makes loads wait for it.
  static constexpr int kTilesAhead = 3;

  struct Keys {
    int tile;
  };

  __device__ __forceinline__ RangeTiles(const ForwardParams& p, const ForwardWorkTile<Config>& work_tile, int)
      : p_(p),
        work_tile_(work_tile),
        begin_(work_tile.tiles.begin),
        first_row_(static_cast<int>(work_tile.sequence.k_begin)) {}

  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ bool packed() const { return p_.seq.cu_seqlens_k; }
  __device__ __forceinline__ int row(int tile) const { return first_row_ + tile * Config::kBlockN; }
  __device__ __forceinline__ Keys take(int rank) const { return {work_tile_.tile_at(rank)}; }

 private:
  const ForwardParams& p_;
  const ForwardWorkTile<Config>& work_tile_;
  const int begin_, first_row_;
};

/// The parameters of the variant of caches.
struct ForwardCacheCall {
  ForwardParams p;
  int copies;     // copies by TMA that fill a tile of K or V
  int copy_rows;  // rows of each copy
  Divisor page_size = Divisor(p.seq.page_size);
};

/// The key tiles of a range in a cache. TMA fills a tile by several copies of copy_rows() rows each, or by one copy
/// where the cache is contiguous. Lane i knows where copy i comes from. A query tile with rows for two of three
/// warpgroups (head_dim 128, 80 keys) leaves the loading warps some 1300 cycles a key tile, so the pages of the next
/// tile are found by steps, not by divisions.
template <class Config>
class CacheTiles {
 public:
  static constexpr int kTilesAhead = RangeTiles<Config>::kTilesAhead;

  struct Keys {
    int tile;
  };

  __device__ __forceinline__ CacheTiles(const ForwardCacheCall& call, const ForwardWorkTile<Config>& work_tile,
                                        int lane)
      : call_(call), begin_(work_tile.tiles.begin), head_(work_tile.sequence.head_kv) {
    const SequenceParams& s = call.p.seq;
    const int last = max(work_tile.tiles.end - 1, begin_);  // an empty work tile looks up a page too, but takes none
    if (s.block_table) {
      table_ = s.block_table + work_tile.sequence.batch * s.block_table_stride;
      const uint32_t position = static_cast<uint32_t>(last * Config::kBlockN + lane * call.copy_rows);
      coming_column_ = static_cast<int>(call.page_size.quotient(position));
      coming_row_ = static_cast<int>(position) - coming_column_ * page_rows();
      step_columns_ = static_cast<int>(call.page_size.quotient(Config::kBlockN));
      step_rows_ = Config::kBlockN - step_columns_ * page_rows();
      look_up();
    } else {
      table_ = nullptr;
      coming_row_ = work_tile.sequence.leftpad + last * Config::kBlockN;
      coming_page_ = work_tile.sequence.cache_row;
    }
  }

  __device__ __forceinline__ int begin() const { return begin_; }
  __device__ __forceinline__ int head() const { return head_; }
  __device__ __forceinline__ int copies() const { return call_.copies; }
  __device__ __forceinline__ int copy_rows() const { return call_.copy_rows; }

  /// Takes the rows that this lane copies of the tile, and issues the load of the page number of its copy of the next
  /// tile. It moves the position, so it must be called once per rank, from the last rank down.
  __device__ __forceinline__ Keys take(int rank) {
    row_ = coming_row_;
    batch_ = coming_page_;
    if (!table_) {
      coming_row_ -= Config::kBlockN;
    } else {
      batch_ = min(max(batch_, 0), static_cast<int>(call_.p.seq.num_pages) - 1);
      if (rank > begin_) step_back();
    }
    return {rank};
  }
  __device__ __forceinline__ int row(int) const { return row_; }
  __device__ __forceinline__ int batch() const { return batch_; }

 private:
  __device__ __forceinline__ int page_rows() const { return static_cast<int>(call_.page_size.value); }

  __device__ __forceinline__ void step_back() {
    coming_column_ -= step_columns_;
    coming_row_ -= step_rows_;
    if (coming_row_ < 0) {
      coming_row_ += page_rows();
      --coming_column_;
    }
    look_up();
  }

  /// Issues the load of the page number of this lane's copy. Positions past the table get the table's last page: no
  /// query sees their rows.
  __device__ __forceinline__ void look_up() {
    coming_page_ = __ldg(table_ + min(coming_column_, static_cast<int>(call_.p.seq.max_pages) - 1));
  }

  const ForwardCacheCall& call_;
  const int begin_, head_;
  const int32_t* table_;          // of the sequence's pages; null: the cache is contiguous
  int step_columns_, step_rows_;  // from a tile to the one before
  int coming_column_;             // of the table
  int coming_row_, coming_page_;  // where this lane's copy of the tile that is taken next begins
  int row_, batch_;               // where its copy of the tile that was taken begins
};

/// A key tile of a block mask's list. Consumers read this metadata together with K.
struct alignas(16) ListedKeys {
  int tile;
  int bitmap;  // number of its bitmap; kFull; or kEndsInBlock: the sequence ends in its block
  int offset;  // of its first key within its block
  int run;     // number of full tiles that follow

  static constexpr int kFull = -1, kEndsInBlock = -2;
};

/// The key tiles of a work tile, from the last one listed to the first. The warp holds 32 blocks, one per lane, and
/// loads the next 32 ahead.
template <class Config>
class ListedTiles {
 public:
  // More than for a range: entries must be looked up first, and a list may be short.
  static constexpr int kTilesAhead = 8;

  __device__ __forceinline__ ListedTiles(const ForwardParams& p, const ForwardWorkTile<Config>& work_tile, int lane)
      : blocks_(p.blocks),
        tiles_of_block_(static_cast<int>(blocks_.block_n) / Config::kBlockN),
        seqlen_k_(work_tile.sequence.seqlen_k),
        first_entry_(work_tile.first_entry),
        lane_(lane),
        left_(work_tile.blocks) {
    prefetch_chunk();
    take_chunk();
  }

  __device__ __forceinline__ static constexpr int begin() { return 0; }
  __device__ __forceinline__ static constexpr bool packed() { return false; }
  __device__ __forceinline__ static int row(int tile) { return tile * Config::kBlockN; }

  /// Returns the next tile; there must be one.
  __device__ __forceinline__ ListedKeys take(int) {
    const int block = __shfl_sync(~0u, block_, at_), bitmap = __shfl_sync(~0u, bitmap_, at_);
    const bool full = full_lanes_ >> at_ & 1;
    const uint32_t after = at_ == 31 ? 0u : ~0u << (at_ + 1);
    const uint32_t stop = ~full_lanes_ & after;  // lanes past the last block are not full
    const int blocks = stop ? __ffs(static_cast<int>(stop)) - 2 - at_ : 31 - at_;
    ListedKeys keys = {block * tiles_of_block_ + part_, full ? ListedKeys::kFull : bitmap, part_ * Config::kBlockN,
                       blocks * tiles_of_block_ + (full ? part_ : 0)};
    if (!full && part_ > 0) keys.run = 0;
    if (--part_ < 0) {
      part_ = tiles_of_block_ - 1;
      if (++at_ == 32) take_chunk();
    }
    return keys;
  }

 private:
  /// Loads the next 32 entries.
  __device__ __forceinline__ void prefetch_chunk() {
    const int entry = left_ - 1 - lane_;
    coming_block_ = coming_bitmap_ = 0;
    if (entry < 0) return;
    coming_block_ = __ldg(blocks_.indices + first_entry_ + entry);
    coming_bitmap_ = __ldg(blocks_.bitmap_ids + first_entry_ + entry);
  }
  __device__ __forceinline__ void take_chunk() {
    const int most = (seqlen_k_ - 1) / static_cast<int>(blocks_.block_n);
    const bool exists = lane_ < left_;
    block_ = min(max(coming_block_, 0), most);
    bitmap_ = min(coming_bitmap_, static_cast<int>(blocks_.num_bitmaps) - 1);
    if (bitmap_ < 0)
      bitmap_ =
          (block_ + 1) * static_cast<int>(blocks_.block_n) > seqlen_k_ ? ListedKeys::kEndsInBlock : ListedKeys::kFull;
    full_lanes_ = __ballot_sync(~0u, exists && bitmap_ == ListedKeys::kFull);
    at_ = 0;
    part_ = tiles_of_block_ - 1;
    left_ -= 32;
    prefetch_chunk();
  }

  const BlockMaskParams& blocks_;
  const int tiles_of_block_, seqlen_k_, first_entry_, lane_;
  int left_;            // blocks that block_ has not held yet
  int block_, bitmap_;  // of this lane
  int coming_block_, coming_bitmap_;
  uint32_t full_lanes_;
  int at_, part_;  // the lane whose block is next, and the tile within that block
};

}  // namespace flash_ext::sm90
