// Scores in accumulators as the A operand of the next product, which lies in the same lanes.
#pragma once

#include <cstdint>

#include "kernels/ptx/arithmetic.h"

namespace flash_ext::sm90 {

/// Register e of step k has the pair of accumulators n = 2 k + e / 2, from element e % 2 * 2 on.
template <class Element, int kSteps>
__device__ __forceinline__ void pack_operand(uint32_t (&operand)[kSteps][4], const float (&s)[1][2 * kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      operand[k][e] = ptx::pack2<Element>(s[0][2 * k + e / 2][e % 2 * 2], s[0][2 * k + e / 2][e % 2 * 2 + 1]);
}

}  // namespace flash_ext::sm90
