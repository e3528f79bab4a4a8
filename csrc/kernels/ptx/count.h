// Counters in shared memory (PTX ISA, "atom").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Adds 1 to a counter and returns what it was. Orders memory as an arrival at an mbarrier and a wait for it do: what
/// others did before they counted comes before what this thread does next.
__device__ __forceinline__ uint32_t count_acquire_release(uint32_t s_counter) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(s_counter) : "memory");
  return before;
}

}  // namespace flash_ext::ptx
