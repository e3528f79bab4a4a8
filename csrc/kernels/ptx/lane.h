// The lane of a thread (PTX ISA, "%laneid").
#pragma once

namespace flash_ext::ptx {

/// Returns threadIdx.x % 32 in one-dimensional CTAs. Volatile, so that it is read once: values that depend on
/// threadIdx.x are computed again in every iteration of a long loop, at the price of a slow read.
__device__ __forceinline__ int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace flash_ext::ptx
