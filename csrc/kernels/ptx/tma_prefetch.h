// Copies to L2 by TMA (PTX ISA, "cp.async.bulk.prefetch.tensor").
#pragma once

#include <cuda.h>

namespace flash_ext::ptx {

/// Copies to L2 the box of a 4-dimensional tensor that starts at the given coordinates, innermost first. Nobody can
/// wait for it.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

}  // namespace flash_ext::ptx
