// CTAs of a cluster, and accesses of one to another's shared memory (PTX ISA, "mapa", "barrier.cluster").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Waits for all threads of all CTAs, which may call it at different places of the program. What they wrote before is
/// visible afterwards.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/// Returns the address of the same place in another CTA's shared memory, as the instructions below take it.
__device__ __forceinline__ uint32_t cluster_address(uint32_t s_slot, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(s_slot), "r"(rank));
  return address;
}

__device__ __forceinline__ uint32_t cluster_load(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

/// Arrives at a barrier of a CTA of the cluster. It does not order earlier writes.
__device__ __forceinline__ void cluster_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// Writes four floats to a CTA of the cluster; the 16 bytes count among those that a barrier there waits for (PTX ISA,
/// "st.async").
__device__ __forceinline__ void cluster_store(uint32_t target, const float (&x)[4], uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(target),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

/// Copies to a CTA of the cluster by TMA; the bytes count among those that a barrier there waits for.
__device__ __forceinline__ void cluster_copy(uint32_t target, uint32_t s_source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
      "r"(s_source), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flash_ext::ptx
