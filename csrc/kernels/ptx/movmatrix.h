// Transposes an 8x8 matrix of 16-bit elements in the registers of a warp (PTX ISA, "movmatrix"). A lane has two
// consecutive elements of row lane / 4: columns 2 (lane % 4) and the next.
#pragma once

#include <cstdint>

namespace flash_ext::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

}  // namespace flash_ext::ptx
