// Sanitises tiles in shared memory: a hidden pair has the weight 0, and 0 * NaN is NaN.
#pragma once

#include <cstdint>

#include "kernels/common/sanitise.cuh"
#include "kernels/ptx/tma.h"

namespace flash_ext::sm90 {

/// kCount pieces of 16 bytes, kStep bytes apart.
template <class Element, int kCount, int kStep>
__device__ __forceinline__ void sanitise_pieces_at(uint32_t s_first) {
  const auto piece = [=](int k) -> uint4& { return shared_piece(s_first + k * kStep); };
  if (sanitise_pieces<Element, true, kCount, 1, 4>(0, piece)) ptx::fence_proxy_async_shared();
}

/// kBytes from s_tile on, by kThreads threads.
template <class Element, int kBytes, int kThreads>
__device__ __forceinline__ void sanitise_tile(uint32_t s_tile, int thread) {
  constexpr int kPieces = kBytes / 16, kFullPieces = kPieces / kThreads, kRest = kPieces % kThreads;
  sanitise_pieces_at<Element, kFullPieces, kThreads * 16>(s_tile + thread * 16);
  if (kRest != 0 && thread < kRest) sanitise_pieces_at<Element, 1, 0>(s_tile + (kFullPieces * kThreads + thread) * 16);
}

}  // namespace flash_ext::sm90
