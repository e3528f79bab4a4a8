// The warp that loads K and V where the lists of a block mask say which tiles of keys there are.
#pragma once

#include "producer.cuh"

namespace flash_ext::sm90 {

/// A tile of keys that is listed, as the warps that compute find it beside K.
struct alignas(16) ListedKeys {
  int tile;
  int bitmap;  // that hides some of it; or kFull, or kCut: the sequence ends in it
  int offset;  // of its first key in its block
  int run;     // so many tiles behind it are full

  static constexpr int kFull = -1, kCut = -2;
};

/// The tiles of a work tile, from the last one listed to the first. A warp looks at 32 blocks at a time, one ahead.
template <class Config>
class KeyTileList {
 public:
  __device__ __forceinline__ KeyTileList(const BlockMaskParams& blocks, int seqlen_k, int first_entry, int count,
                                         int lane)
      : blocks_(blocks),
        tiles_of_block_(static_cast<int>(blocks.block_n) / Config::kBlockN),
        seqlen_k_(seqlen_k),
        first_entry_(first_entry),
        lane_(lane),
        left_(count) {
    ask();
    take_chunk();
  }

  /// The next one; there must be one.
  __device__ __forceinline__ ListedKeys take() {
    const int block = __shfl_sync(~0u, block_, at_), bitmap = __shfl_sync(~0u, bitmap_, at_);
    const bool full = full_lanes_ >> at_ & 1;
    const uint32_t behind = at_ == 31 ? 0u : ~0u << (at_ + 1);
    const uint32_t stop = ~full_lanes_ & behind;  // lanes beyond the last block are not full
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
  /// For the 32 blocks behind those that were taken.
  __device__ __forceinline__ void ask() {
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
    if (bitmap_ < 0) bitmap_ = (block_ + 1) * static_cast<int>(blocks_.block_n) > seqlen_k_ ? ListedKeys::kCut : -1;
    full_lanes_ = __ballot_sync(~0u, exists && bitmap_ == ListedKeys::kFull);
    at_ = 0;
    part_ = tiles_of_block_ - 1;
    left_ -= 32;
    ask();
  }

  const BlockMaskParams& blocks_;
  const int tiles_of_block_, seqlen_k_, first_entry_, lane_;
  int left_;            // blocks behind those in registers
  int block_, bitmap_;  // of this lane
  int coming_block_, coming_bitmap_;
  uint32_t full_lanes_;
  int at_, part_;  // the lane whose block is next, and which tile of it
};

template <class Config>
struct ForwardBlocksStorage : ForwardStorage<Config> {
  ListedKeys listed_keys[Config::kKeyStages];  // beside k_full
};

template <class Config>
class ForwardBlocksProducer : public ForwardProducer<Config> {
  using Base = ForwardProducer<Config>;
  using Base::address;
  using Base::lane_;
  using Base::maps_;
  using Base::p_;
  using typename Base::OutSlots;
  using typename Base::WorkTile;
  // More than the plain kernel's: what is listed is looked up first, and a list may be short.
  static constexpr int kTilesAhead = 8;

 public:
  __device__ __forceinline__ ForwardBlocksProducer(const ForwardParams& p, const ForwardMaps& maps,
                                                   ForwardBlocksStorage<Config>& storage, char* tiles, int lane)
      : Base(p, maps, storage, tiles, lane), storage_(storage) {}

  /// As the plain producer's, of the tiles in the list.
  __device__ __forceinline__ void load_keys() {
    WorkTileQueue<ForwardStorage<Config>> queue(storage_);
    RingPosition<Config::kKeyStages> k_at;
    RingPosition<Config::kValueStages> v_at;
    OutSlots k_slots, v_slots;
    while (const WorkTile* const work_tile = queue.front()) {
      const Sequence& s = work_tile->sequence;
      KeyTileList<Config> list(p_.blocks, s.seqlen_k, work_tile->first_entry, work_tile->blocks, lane_);
      const int announced = min(kTilesAhead, work_tile->tiles.end - 1);
      for (int rank = work_tile->tiles.end - 1; rank >= 0; --rank) {
        if (rank == announced && lane_ == 0) ptx::mbarrier_arrive(address(storage_.work_tile_loaded));
        const ListedKeys keys = list.take();
        const int row = keys.tile * Config::kBlockN;
        this->wait_for_stage(storage_.k_empty, storage_.out_left_keys, k_at, k_slots);
        if (lane_ == 0) {
          storage_.listed_keys[k_at.stage()] = keys;
          this->template load<Base::kPanels>(maps_.k, address(storage_.k_full[k_at.stage()]),
                                             this->s_k_ + k_at.stage() * Config::kKeyBytes, Config::kBlockN, row,
                                             s.head_kv, s.batch, false);
        }
        k_at.advance();
        this->wait_for_stage(storage_.v_empty, storage_.out_left_values, v_at, v_slots);
        if (lane_ == 0) {
          const uint64_t& came = (work_tile->sanitised ? storage_.v_raw : storage_.v_full)[v_at.stage()];
          this->template load<Base::kValuePanels>(maps_.v, address(came),
                                                  this->s_v_ + v_at.stage() * Config::kValueBytes, Config::kBlockN, row,
                                                  s.head_kv, s.batch, false);
        }
        v_at.advance();
        __syncwarp();
      }
      if (announced < 0 && lane_ == 0) ptx::mbarrier_arrive(address(storage_.work_tile_loaded));
      static_assert(!Config::kOutInRings);
      queue.pop(lane_);
    }
  }

 private:
  ForwardBlocksStorage<Config>& storage_;
};

}  // namespace flash_ext::sm90
