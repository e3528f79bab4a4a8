// Packs scores in accumulators into the A operand of the next product, whose elements lie in the same lanes.
#pragma once

#include <cstdint>

#include "kernels/ptx/arithmetic.h"

namespace flash_ext::sm90 {

/// Packs s: register e of step k gets two elements of accumulator n = 2 k + e / 2, from element e % 2 * 2 on.
template <class Element, int kSteps>
__device__ __forceinline__ void pack_operand(uint32_t (&operand)[kSteps][4], const float (&s)[1][2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      operand[k][e] = ptx::pack2<Element>(s[0][2 * k + e / 2][e % 2 * 2], s[0][2 * k + e / 2][e % 2 * 2 + 1]);
}

}  // namespace flash_ext::sm90
