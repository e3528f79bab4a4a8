// The slots of shared memory through which a CTA's work tiles go from the warp that makes them to all others.
#pragma once

#include "kernels/common/ring.cuh"
#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_address.h"

namespace flash_ext {

/// The work tiles of a CTA as one of its warps goes through it.
template <class Storage>
class WorkTileQueue {
 public:
  using WorkTile = typename Storage::WorkTile;

  __device__ __forceinline__ explicit WorkTileQueue(Storage& storage) : storage_(storage) {}

  /// The next work tile, or null after the last.
  __device__ __forceinline__ WorkTile* front() {
    ptx::mbarrier_wait(ptx::shared_address(&storage_.work_tile_full[at_.stage()]), at_.parity());
    return storage_.has_work_tile[at_.stage()] ? &storage_.work_tile_in(at_.stage()) : nullptr;
  }

  /// Releases the slot: the warp has read its work tile.
  __device__ __forceinline__ void pop(int lane) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&storage_.work_tile_empty[at_.stage()]));
    at_.advance();
  }

 protected:
  Storage& storage_;
  RingPosition<Storage::kSlots> at_;
};

}  // namespace flash_ext
