// Copies from global to shared memory that a barrier in shared memory waits for (PTX ISA, "cp.async.mbarrier.arrive").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Arrives at the barrier once this thread's copies so far have arrived. The barrier's count includes this arrival.
__device__ __forceinline__ void cp_async_arrive(uint32_t s_barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(s_barrier) : "memory");
}

}  // namespace flash_ext::ptx
