// Copies of tensors' boxes by TMA (PTX ISA, "cp.async.bulk.tensor"). Stores are committed and waited for as in bulk.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "bulk.h"

namespace flash_ext::ptx {

/// Loads the box of a 4-dimensional tensor that starts at the given coordinates, innermost first. Elements outside of
/// the tensor become 0. All bytes of the box count among those that the barrier waits for.
__device__ __forceinline__ void tma_load(uint32_t s_target, const CUtensorMap* map, uint32_t s_barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(s_target),
      "l"(map), "r"(s_barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Stores the part of the box that lies within the tensor. A bulk_commit() must follow.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t s_source, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(s_source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

/// Orders this thread's writes to shared memory before later reads of it by wgmma and TMA, which reach memory another
/// way. The signal to the reader must follow.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash_ext::ptx
