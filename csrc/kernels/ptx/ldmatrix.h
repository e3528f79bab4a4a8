// Loads four 8x8 matrices of 16-bit elements from shared memory into fragments (PTX ISA, "ldmatrix").
// Lane l gives the address of row l % 8 of matrix l / 8; afterwards it holds elements (l / 4, 2 (l % 4) + {0, 1}) of
// each, or of each transposed.
#pragma once

#include <cstdint>

#include "load_shared.h"

namespace flash_ext::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t s_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(s_row)
               : "memory");
}

/// Waits until fragments of the warp have arrived, as wait_for_loaded() does.
template <int kCount>
__device__ __forceinline__ void wait_for_fragments(const uint32_t (&fragments)[kCount][4]) {
  uint32_t all = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) all |= fragments[k][0] | fragments[k][1] | fragments[k][2] | fragments[k][3];
  wait_for_loaded(all);
}

}  // namespace flash_ext::ptx
