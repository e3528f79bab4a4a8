// Additions in memory that return nothing (PTX ISA, "red").
#pragma once

namespace flash_ext::ptx {

__device__ __forceinline__ void reduce_add(float* g_target, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(g_target), "f"(x) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// Adds to four neighbours, aligned to 16 bytes, each one atomically.
__device__ __forceinline__ void reduce_add_4(float* g_target, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(g_target), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

}  // namespace flash_ext::ptx
