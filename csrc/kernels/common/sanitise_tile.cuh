// Removes Inf and NaN from tiles in shared memory; sanitise.cuh says why.
#pragma once

#include "sanitise.cuh"
#include "tile.cuh"

namespace flash_ext {

/// Makes 0 of the non-finite elements, or with kBounded a large number of Inf, among the pieces that this thread itself
/// loaded by load_tile with the same template arguments: its own copies have landed once it waited for them. True if
/// there were some.
template <class Element, int kColumns, int kThreads, int kRows, bool kBounded = false>
__device__ __forceinline__ bool remove_non_finite(uint32_t s_tile, int thread = static_cast<int>(threadIdx.x)) {
  using Layout = TileLayout<Element, kColumns>;
  using Test = NonFinite<Element>;
  constexpr int kTotal = kRows * Layout::kPieces;
  const auto piece_at = [&](int flat) { return s_tile + Layout::at(flat / Layout::kPieces, flat % Layout::kPieces); };
  const auto finite = [](uint32_t word) { return kBounded ? Test::bounded(word) : Test::without(word); };
  uint32_t found = 0;
#pragma unroll 4
  for (int flat = thread; flat < kTotal; flat += kThreads) {
    const uint4 piece = load_shared<uint4>(piece_at(flat));
    found |= Test::in_word(piece.x) | Test::in_word(piece.y) | Test::in_word(piece.z) | Test::in_word(piece.w);
  }
  if (!found) return false;
#pragma unroll 1
  for (int flat = thread; flat < kTotal; flat += kThreads) {
    const uint4 piece = load_shared<uint4>(piece_at(flat));
    store_shared(piece_at(flat), uint4{finite(piece.x), finite(piece.y), finite(piece.z), finite(piece.w)});
  }
  return true;
}

}  // namespace flash_ext
