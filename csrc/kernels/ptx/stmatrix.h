// Stores fragments of four 8x8 matrices of 16-bit elements to shared memory, from Hopper on (PTX ISA, "stmatrix").
// Fragments and rows lie as for ldmatrix.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ __forceinline__ void stmatrix_x4(uint32_t s_row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}
#endif

}  // namespace flash_ext::ptx
