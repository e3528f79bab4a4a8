// The key tiles that the variants with bias, masks or dropout visit: those of a range that masks leave, each with
// metadata that says which warpgroups visit it.
#pragma once

#include "visibility.h"
#include "work_tile.cuh"

namespace flash_ext::sm90 {

/// Metadata of a key tile. Bit g: warpgroup g visits it. Bit kMasked + g: a mask hides part of it from warpgroup g. Bit
/// kWindowed + g: the window does. From bit kRunShift on: how many of the following tiles need no metadata except
/// kMasked, because without masks all rows see all of them, and none is the last of the work tile.
struct alignas(8) TileMetadata {  // one load; K is released after a branch that waits for it
  static constexpr int kMasked = 8, kWindowed = 16, kRunShift = 24;
  static constexpr uint32_t kAll = (1u << kMasked) - 1, kMostRun = 31, kSanitised = 1u << 30, kLast = 1u << 31;

  int tile;
  uint32_t flags;  // kSanitised: V is sanitised; kLast: the last tile of a work tile

  __device__ __forceinline__ bool any() const { return flags & kAll; }
  __device__ __forceinline__ bool visible(int group) const { return flags >> group & 1; }
  /// Whether all its rows see the whole tile, masks aside.
  __device__ __forceinline__ bool is_full_for(int group) const {
    return (flags >> group & (1u | 1u << kWindowed)) == 1u;
  }
  __device__ __forceinline__ bool is_masked(int group) const { return flags >> (kMasked + group) & 1; }
  __device__ __forceinline__ int run() const { return static_cast<int>(flags >> kRunShift & kMostRun); }
};

/// The key tiles of a work tile that masks leave, from the last to the first. A warp tests 32 at a time. Each producer
/// warp has a list of its own, so that none waits for another. kFindsBits: the list also locates the mask bits.
template <class Config, bool kFindsBits = false>
class VisibleTiles {
 public:
  static constexpr int kKeyParts = Config::kKeyParts, kEntries = Config::kWarpgroups * kKeyParts;  // of a tile

  __device__ __forceinline__ VisibleTiles(const ForwardVisibility& visible, const ForwardWorkTile<Config>& work_tile,
                                          int lane)
      : visible_(visible), work_tile_(work_tile), lane_(lane), first_(work_tile.tiles.end - 1) {
    test_tiles();
    skip();
  }

  /// Returns the next tile. If masks leave no tile, returns one that no warpgroup visits.
  __device__ __forceinline__ TileMetadata take() {
    if (!left_) return {0, TileMetadata::kLast};
    const int k = __ffs(static_cast<int>(left_)) - 1;
    left_ &= left_ - 1;
    TileMetadata metadata = {first_ - k, __shfl_sync(~0u, mine_, k)};
    if (kFindsBits && visible_.entries) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const int entry = __shfl_sync(~0u, entries_[i], k);
        if (lane_ == i) entry_ = entry;
      }
    }
    metadata.flags |= run() << TileMetadata::kRunShift;
    skip();
    if (!left_) metadata.flags |= TileMetadata::kLast;
    return metadata;
  }

  /// For the tile taken last: lane g * kKeyParts + k gets the index of the PairBits of part k for warpgroup g, if the
  /// warpgroup visits the tile.
  __device__ __forceinline__ int entry() const { return entry_; }

 private:
  __device__ __forceinline__ void test_tiles() {
    mine_ = flags_of(first_ - lane_);
    left_ = __ballot_sync(~0u, mine_ != 0);
    full_lanes_ = __ballot_sync(~0u, is_full(mine_));
  }

  /// Whether every warpgroup that has rows sees the whole tile, masks aside.
  __device__ __forceinline__ bool is_full(uint32_t flags) const {
    if (flags & (TileMetadata::kAll << TileMetadata::kWindowed)) return false;
    for (int g = 0; g < Config::kWarpgroups; ++g)
      if (work_tile_.has_rows(g) && !(flags >> g & 1)) return false;
    return true;
  }

  /// TileMetadata::run() of the tile taken last.
  __device__ __forceinline__ uint32_t run() const {
    const uint32_t partial = left_ & ~full_lanes_;
    const uint32_t before_partial = partial ? left_ & ((partial & -partial) - 1) : left_;
    // The last tile that was tested may be the last of the work tile, which a run leaves out.
    return max(__popc(before_partial) - (partial ? 0 : 1), 0);
  }

  __device__ __forceinline__ void skip() {
    while (!left_ && first_ - 32 >= work_tile_.tiles.begin) {
      first_ -= 32;
      test_tiles();
    }
  }

  __device__ __forceinline__ uint32_t flags_of(int tile) {
    if (tile < work_tile_.tiles.begin) return 0;
    uint32_t flags = 0;
#pragma unroll
    for (int g = 0; g < Config::kWarpgroups; ++g) {
      if (tile < work_tile_.rows[g].begin || tile >= work_tile_.rows[g].end) continue;
      const bool partial = tile < work_tile_.rows[g].full_begin || tile >= work_tile_.rows[g].full_end;
      flags |= (flag_of(g, tile) | static_cast<uint32_t>(partial) << TileMetadata::kWindowed) << g;
    }
    if (!(flags & TileMetadata::kAll)) return 0;
    const bool may_be_masked = work_tile_.sanitised && visible_.entries;
    return may_be_masked || work_tile_.is_sanitised(tile) ? flags | TileMetadata::kSanitised : flags;
  }

  /// Returns the flags of a tile for a warpgroup, in the bits of warpgroup 0.
  __device__ __forceinline__ uint32_t flag_of(int group, int tile) {
    constexpr uint32_t kSeen = 1, kSeenPartly = 1 | 1u << TileMetadata::kMasked;
    if (!visible_.entries) return kSeen;
    const int* const g_entries = visible_.row(work_tile_.sequence.batch, work_tile_.sequence.head,
                                              work_tile_.first_query / kWarpgroupRows + group) +
                                 tile * kKeyParts;
    bool none = true, all = true;
#pragma unroll
    for (int k = 0; k < kKeyParts; ++k) {
      const int entry = __ldg(g_entries + k);
      if constexpr (kFindsBits) entries_[group * kKeyParts + k] = entry;
      none &= entry == kNonePairs;
      all &= entry == kAllPairs;
    }
    return none ? 0 : all ? kSeen : kSeenPartly;
  }

  const ForwardVisibility& visible_;
  const ForwardWorkTile<Config>& work_tile_;
  const int lane_;
  int first_;                                    // the tile of lane 0; lane 1 has the tile before it, and so on
  uint32_t mine_, left_;                         // flags of this lane's tile; lanes whose tiles are still to be visited
  uint32_t full_lanes_;                          // lanes whose tiles need no metadata except for masks
  int entries_[kFindsBits ? kEntries : 1] = {};  // of this lane's tile
  int entry_ = 0;
};

}  // namespace flash_ext::sm90
