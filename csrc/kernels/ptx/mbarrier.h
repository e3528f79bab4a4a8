// Barriers in shared memory that count arrivals and bytes (PTX ISA, "mbarrier"). A phase ends when all its arrivals and
// all bytes announced for it have come. A thread that waits for a phase names its parity, which starts at 0. Addresses
// are addresses of shared memory.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t s_barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(s_barrier), "r"(arrivals) : "memory");
}

/// Makes initialised barriers visible to TMA. A barrier of the CTA must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t s_barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(s_barrier) : "memory");
}

/// Arrives, and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t s_barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(s_barrier), "r"(bytes) : "memory");
}

/// Announces bytes that copies will bring, and does not arrive.
__device__ __forceinline__ void mbarrier_expect(uint32_t s_barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(s_barrier), "r"(bytes) : "memory");
}

/// Waits for a while for the phase to end, and returns whether it has.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t s_barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(s_barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

/// Returns at once whether the phase has ended.
__device__ __forceinline__ bool mbarrier_test(uint32_t s_barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.u32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(s_barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t s_barrier, uint32_t parity) {
  while (!mbarrier_try_wait(s_barrier, parity)) {
  }
}

}  // namespace flash_ext::ptx
