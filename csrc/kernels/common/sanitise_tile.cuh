// Tiles freed of Inf and NaN in shared memory, see sanitise.cuh.
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
  constexpr int kTotal = kRows * Layout::kPieces;
  const auto piece = [&](int flat) -> uint4& {
    return shared_piece(s_tile + Layout::at(flat / Layout::kPieces, flat % Layout::kPieces));
  };
  return sanitise_pieces<Element, kBounded, kTotal, kThreads, 4>(thread, piece);
}

}  // namespace flash_ext
