// The consumer warpgroups of the persistent kernel: the pipelined loop, for one key tile after another. dV and dK are
// stored through shared memory.
#pragma once

#include "kernels/ptx/reread.h"
#include "kernels/ptx/tma.h"
#include "kernels/sm90/common/backward/option_scores.cuh"
#include "kernels/sm90/common/backward/pipelined_consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

/// Like BackwardOneTile, for a persistent CTA, whose key tiles alternate between the slots.
template <class Config>
struct BackwardCursor {
  uint32_t count = 0;  // lower 30 bits: of steps, which are fewer; upper two: of tiles

  template <class Storage>
  __device__ __forceinline__ const uint64_t& k_full(const Storage& storage) const {
    return storage.k_full[slot()];
  }
  template <class Storage>
  __device__ __forceinline__ const uint64_t& v_full(const Storage& storage) const {
    return storage.v_full[slot()];
  }
  __device__ __forceinline__ uint32_t parity() const { return count >> 31; }
  __device__ __forceinline__ uint32_t slot() const { return count >> 30 & 1; }
  __device__ __forceinline__ void advance() { count += 1u << 30; }
  /// The number of steps of all tiles before.
  __device__ __forceinline__ uint32_t steps() const { return ptx::uniform(count % (1u << 30)); }

  __device__ __forceinline__ uint32_t keys_offset() const { return slot() * Config::kKeySlotBytes; }
  template <class Storage>
  __device__ __forceinline__ BackwardStepsOf<Config> first_step(const Storage& storage) const {
    BackwardStepsOf<Config> step(storage.work_tiles[slot()]);
    step.stage = steps() % Config::kStages, step.parity = steps() / Config::kStages % 2;
    if constexpr (Config::kListsBlocks) step.slot = steps() % kMetadataSlots;
    return step;
  }
  __device__ __forceinline__ RingCount<Config::kDsStages> first_ds() const { return {steps()}; }
  __device__ __forceinline__ void leave(const RingCount<Config::kDsStages>& ds) {
    count = (count & 3u << 30) | ds.count;
  }
};

template <class Config, class Storage = BackwardPersistentStorageOf<Config>>
using BackwardPersistentScores = std::conditional_t<Config::kHasOptions, BackwardOptionScores<Config, Storage>,
                                                    BackwardPlainScores<Config, Storage>>;

/// A consumer warp, for the key tile that the cursor points to.
template <class Config>
class BackwardPersistentConsumer : BackwardPipelinedConsumer<Config, BackwardPersistentScores<Config>> {
 public:
  using Base = BackwardPipelinedConsumer<Config, BackwardPersistentScores<Config>>;
  using typename Base::Storage;

  __device__ __forceinline__ BackwardPersistentConsumer(const BackwardParams& p, Storage& storage, uint32_t s_tiles,
                                                        float scale, int warpgroup, int lane,
                                                        const BackwardCursor<Config>& at)
      : Base(p, storage, at.slot(), s_tiles, scale, warpgroup, lane) {}

  /// Runs that tile and moves the cursor on.
  __device__ __forceinline__ void run(BackwardCursor<Config>& at, const BackwardStoringMaps& maps) {
    zero_accumulators(dk_);
    zero_accumulators(dv_);
    if (work_tile_.tiles.begin < work_tile_.tiles.end) {
      this->sum_up(at);
    } else {
      wait_for(at.k_full(storage_), at.parity());
      wait_for(at.v_full(storage_), at.parity());
    }
    if (work_tile_.heads > 0) store_sums(maps);  // else there is no such tile
    at.advance();
  }

 private:
  using Base::dk_, Base::dv_, Base::lane_, Base::p_, Base::rules_, Base::s_tiles_, Base::storage_, Base::warp_,
      Base::warpgroup_, Base::work_tile_;

  /// Stores dV and dK through shared memory. TMA takes them from there while the warp goes on.
  __device__ __forceinline__ void store_sums(const BackwardStoringMaps& maps) const {
    if (work_tile_.sums) return this->store_splits();
    if (p_.dv.data) store_sum(maps.dv, dv_, rules_.keep_scale());
    if (p_.dk.data) store_sum(maps.dk, dk_, this->dk_scale());
  }
  __device__ __forceinline__ void store_sum(const BackwardRowMaps& maps, const typename Base::Sum& sum,
                                            float scale) const {
    const int lane = ptx::reread(lane_);
    const uint32_t s_rows =
        s_tiles_ + Config::kStoresOffset + (warpgroup_ * kWarpgroupWarps + warp_) * Config::kStoreBytes;
    if (lane == 0) ptx::bulk_wait_read<0>();  // the slot's previous contents
    __syncwarp();
    write_out_tile<typename Config::Element>(s_rows, sum, {scale, scale}, 0, lane);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      this->store_panel(maps, s_rows, 0);
      ptx::bulk_commit();
    }
    __syncwarp();
  }
};

}  // namespace flash_ext::sm90
