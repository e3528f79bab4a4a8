// Tiles of the persistent kernel where a block mask's lists say which queries there are.
#pragma once

#include "config.cuh"
#include "kernels/sm90/common/backward/pieces.cuh"

namespace flash_ext::sm90 {

/// A step is made of pieces of the list of a key tile.
template <class Element, int kHeadDim>
struct BackwardPersistentBlocksConfig : BackwardPersistentConfig<Element, kHeadDim> {
  using Base = BackwardPersistentConfig<Element, kHeadDim>;
  static constexpr bool kListsBlocks = true, kZeroesDq = false;
  static constexpr int kPieces = Base::kBlockM / kPieceQueries;
  static constexpr int kPieceBytes = Base::kQueryBytes / kPieces;     // of Q or dO
  static constexpr int kPieceTermBytes = kPieceQueries * 4;           // lse or D
  static constexpr int kDqOfPiece = kPieceQueries * kDqPlaneColumns;  // floats of a plane of dQ^T

  static_assert(Base::kBlockM % kPieceQueries == 0 && kBackwardBlockM % kPieceQueries == 0,
                "steps, and the blocks that are served, are made of whole pieces");
  static_assert(kPieceQueries % 16 == 0, "row terms are permuted within 16 queries");
  static_assert(kPieceQueries * kPanelRowBytes % kSwizzleBytes == 0, "a piece is loaded as rows of a swizzled tile");
  static_assert(Base::kBlockM / 8 <= 16, "a lane's words have a bit for each of its queries");
  static_assert(Base::kWarpgroups == kListedKeyGroups && kWarpgroupRows == kListedGroupKeys,
                "a step's metadata has the bits of each warpgroup's keys");
  static_assert(kMetadataSlots > Base::kStages && (kMetadataSlots & (kMetadataSlots - 1)) == 0,
                "metadata outlives its stage; a step has the slot of its number");
  static_assert(kPieceQueries == kTailQueries, "the last step of a list lacks whole pieces");
};

}  // namespace flash_ext::sm90
