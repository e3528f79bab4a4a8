// Functions for the barriers of ptx/mbarrier.h that are members of a struct in shared memory.
#pragma once

#include <cstdint>

#include "kernels/ptx/mbarrier.h"
#include "kernels/ptx/shared_address.h"

namespace flash_ext {

__device__ __forceinline__ uint32_t address(const uint64_t& barrier) { return ptx::shared_address(&barrier); }

__device__ __forceinline__ void init_barrier(uint64_t& barrier, uint32_t arrivals) {
  ptx::mbarrier_init(address(barrier), arrivals);
}
template <int kCount>
__device__ __forceinline__ void init_barriers(uint64_t (&barriers)[kCount], uint32_t arrivals) {
  for (uint64_t& barrier : barriers) init_barrier(barrier, arrivals);
}

__device__ __forceinline__ void wait_for(const uint64_t& barrier, uint32_t parity) {
  ptx::mbarrier_wait(address(barrier), parity);
}

/// One lane of a warp arrives when all lanes have got here. What they wrote comes before the arrival, and no lane can
/// still be waiting for a phase that is two back.
__device__ __forceinline__ void arrive_as_warp(const uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane == 0) ptx::mbarrier_arrive(address(barrier));
}

}  // namespace flash_ext
