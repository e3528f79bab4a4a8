// Stores fragments of four 8x8 matrices of 16-bit elements to shared memory, each transposed (PTX ISA, "stmatrix").
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t s_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(s_row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flash_ext::ptx
