// Copies of bytes that lie side by side, by the copy engine (PTX ISA, "cp.async.bulk").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// A multiple of 16 bytes, aligned to 16, which count among those that arrive at the barrier.
__device__ __forceinline__ void bulk_load(uint32_t s_target, const void* g_source, int bytes, uint32_t s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(s_target),
      "l"(g_source), "r"(bytes), "r"(s_barrier)
      : "memory");
}

/// Announces bytes that copies will bring, and does not arrive.
__device__ __forceinline__ void mbarrier_expect(uint32_t s_barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(s_barrier), "r"(bytes) : "memory");
}

}  // namespace flash_ext::ptx
