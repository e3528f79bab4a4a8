// Copies from global to shared memory that bypass registers (PTX ISA, "cp.async").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t s_target, const void* g_source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(s_target), "l"(g_source) : "memory");
}

/// Copies 16 bytes. If !valid, it writes zeros and does not read the source.
__device__ __forceinline__ void cp_async_16(uint32_t s_target, const void* g_source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s_target), "l"(g_source),
               "r"(valid ? 16 : 0)
               : "memory");
}

/// Copies 16 bytes, of which only the first `bytes` are read; the others become zeros.
__device__ __forceinline__ void cp_async_16_of(uint32_t s_target, const void* g_source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(s_target), "l"(g_source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most the kPending newest groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
