// Copies and reductions of contiguous memory by TMA, in multiples of 16 bytes at multiples of 16 (PTX ISA,
// "cp.async.bulk", "cp.reduce.async.bulk").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

/// Copies from global to shared memory. The bytes count among those that the barrier waits for.
__device__ __forceinline__ void bulk_load(uint32_t s_target, const void* g_source, uint32_t bytes, uint32_t s_barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(s_target),
      "l"(g_source), "r"(bytes), "r"(s_barrier)
      : "memory");
}

/// Copies from shared to global memory. A bulk_commit() must follow.
__device__ __forceinline__ void bulk_store(float* g_target, uint32_t s_source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g_target), "r"(s_source), "r"(bytes)
               : "memory");
}

/// Adds floats to global memory, each one atomically. A bulk_commit() must follow.
__device__ __forceinline__ void bulk_reduce_add(float* g_target, uint32_t s_source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(g_target),
               "r"(s_source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Orders this thread's bulk stores and reductions, which reach memory another way, and its other accesses to global
/// memory: what it wrote or saw there before its later bulk operations, and those that are over before what it does
/// later.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Waits until this thread's groups are done: memory has what they stored or added.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Waits until this thread's groups, except the last kPending, have read their sources.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace flash_ext::ptx
