// Sanitises tiles in shared memory: a hidden pair has the weight 0, and 0 * NaN is NaN.
#pragma once

#include <cstdint>

#include "kernels/common/sanitise.cuh"
#include "kernels/common/tile.cuh"
#include "kernels/ptx/tma.h"

namespace flash_ext::sm90 {

/// kCount pieces of 16 bytes, kStep bytes apart.
template <class Element, int kCount, int kStep>
__device__ __forceinline__ void remove_non_finite(uint32_t s_first) {
  uint32_t found = 0;
#pragma unroll 4
  for (int k = 0; k < kCount; ++k) found |= NonFinite<Element>::in_piece(load_shared<uint4>(s_first + k * kStep));
  if (!found) return;
#pragma unroll 1
  for (int k = 0; k < kCount; ++k)
    store_shared(s_first + k * kStep, NonFinite<Element>::bounded(load_shared<uint4>(s_first + k * kStep)));
  ptx::fence_proxy_async_shared();
}

/// kBytes from s_tile on, by kThreads threads.
template <class Element, int kBytes, int kThreads>
__device__ __forceinline__ void sanitise_tile(uint32_t s_tile, int thread) {
  constexpr int kPieces = kBytes / 16, kFullPieces = kPieces / kThreads, kRest = kPieces % kThreads;
  remove_non_finite<Element, kFullPieces, kThreads * 16>(s_tile + thread * 16);
  if (kRest != 0 && thread < kRest) remove_non_finite<Element, 1, 0>(s_tile + (kFullPieces * kThreads + thread) * 16);
}

}  // namespace flash_ext::sm90
