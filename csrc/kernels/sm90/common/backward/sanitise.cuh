// Sanitises tiles in shared memory: a hidden pair has the weight 0, and 0 * NaN is NaN.
#pragma once

#include <cstdint>

#include "kernels/common/sanitise.cuh"
#include "kernels/ptx/tma.h"

namespace flash_ext::sm90 {

/// Sanitises kCount 16-byte chunks, kStep bytes apart. If it changes any, it makes them visible to wgmma.
template <class Element, int kCount, int kStep>
__device__ __forceinline__ void sanitise_chunks_at(uint32_t s_first) {
  const auto chunk = [=](int k) -> uint4& { return shared_chunk(s_first + k * kStep); };
  if (sanitise_chunks<Element, true, kCount, 1, 4>(0, chunk)) ptx::fence_proxy_async_shared();
}

/// Sanitises kBytes from s_tile on, by kThreads threads together.
template <class Element, int kBytes, int kThreads>
__device__ __forceinline__ void sanitise_tile(uint32_t s_tile, int thread) {
  constexpr int kChunks = kBytes / 16, kFullChunks = kChunks / kThreads, kRest = kChunks % kThreads;
  sanitise_chunks_at<Element, kFullChunks, kThreads * 16>(s_tile + thread * 16);
  if (kRest != 0 && thread < kRest) sanitise_chunks_at<Element, 1, 0>(s_tile + (kFullChunks * kThreads + thread) * 16);
}

}  // namespace flash_ext::sm90
