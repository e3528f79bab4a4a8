// Tiles and shared memory of a variant of decoding.
#pragma once

#include "kernels/common/tile.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

template <class Element_, int kHeadDim_, int kRowWarps_>
struct DecodeConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kBlockM = 16 * kRowWarps;
  static constexpr bool kWide = kHeadDim == 256;
  // Out takes half of the registers where heads are wide. With float, whose operands are twofold, two warps share it:
  // both compute S.
  static constexpr int kColumnWarps = kWide && sizeof(Element) == 4 ? 2 : 1;
  static constexpr bool kQueryInRegisters = sizeof(Element) == 2 && !kWide;
  static constexpr int kTeam = kRowWarps * kColumnWarps;  // warps that share key tiles

  using Layout = TileLayout<Element, kHeadDim>;
  // 16 keys are the depth of a product; short rows allow 32, which share the work on maxima.
  static constexpr int kBlockN = (kRowWarps > 1 && !kWide) || Layout::kRowBytes <= 128 ? 32 : 16;
  static constexpr int kStageBytes = 2 * Layout::bytes(kBlockN);
  // The ring's size: 64 KB have to be under way on an SM, several CTAs share it, and RTX cards have 99 KB.
  static constexpr int kStages = kQueryInRegisters ? 3 : 2;
  static constexpr int kKeyWarps = kTeam > 1 ? 1 : (32 * 1024 / kStageBytes < 4 ? 32 * 1024 / kStageBytes : 4);
  static constexpr int kThreads = 32 * kTeam * kKeyWarps;

  // Shared memory: the tile, the rules of its rows, then Q and the ring or, at the end, out and the warps' states.
  static constexpr int kTileBytes = 256;
  static constexpr int kRulesOffset = kTileBytes;
  static constexpr int kRulesBytes = kBlockM * 16;
  static constexpr int kLoopOffset = kRulesOffset + kRulesBytes;
  static constexpr int kQueryBytes = Layout::bytes(kBlockM);
  static constexpr int kRingOffset = kLoopOffset + (kQueryInRegisters ? 0 : kQueryBytes);
  static constexpr int kRingBytes = kKeyWarps * kStages * kStageBytes;
  static constexpr int kQueryOffset = kQueryInRegisters ? kRingOffset + (kStages - 1) * kStageBytes : kLoopOffset;
  static constexpr int kLoopEnd = kRingOffset + kRingBytes;
  static constexpr int kOutStride = kHeadDim + 8;  // floats: rows shift by 8 banks
  static constexpr int kStorageOffset = kLoopOffset + kKeyWarps * kBlockM * kOutStride * 4;
  static constexpr int kStorageEnd = kStorageOffset + kKeyWarps * kBlockM * 8;
  static constexpr int kSharedBytes = kLoopEnd > kStorageEnd ? kLoopEnd : kStorageEnd;
  static_assert(!kQueryInRegisters || kQueryBytes <= kStageBytes, "Q passes through the stage that is filled last");
  static_assert(sizeof(DecodeTile) <= kTileBytes, "the shared-memory plan has room for it");
  static_assert(kSharedBytes <= 99 * 1024, "every GPU must be able to launch it");
};

}  // namespace flash_ext::sm80
