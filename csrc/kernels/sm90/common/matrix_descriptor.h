// Descriptors of tiles in shared memory (kernels/common/panels.h), by which wgmma reads them.
#pragma once

#include <cstdint>

#include "kernels/common/panels.h"

namespace flash_ext::sm90 {

/// Descriptors (PTX ISA, "wgmma, matrix descriptor") of parts of a tile with kRows rows. Bits 0-13: address / 16;
/// 16-29: leading dimension byte offset / 16, here kNextPanel; 32-45: stride dimension byte offset / 16, here
/// kEightRows; 62-63: the swizzle, 1 = 128 bytes, 2 = 64. Their upper half is a constant, and offsets are added to the
/// lower one, so that they are made in the uniform registers.
template <int kRows>
struct TileDescriptor {
  static constexpr uint32_t kSwizzle128 = 1u << 30;
  static constexpr uint32_t kEightRows = kSwizzleBytes / 16;
  static constexpr uint32_t kNextPanel = panel_bytes(kRows) / 16;

  __device__ __forceinline__ static uint32_t lower_half(uint32_t s_tile) { return s_tile >> 4 | kNextPanel << 16; }
  /// The descriptor of the part that begins `offset` bytes after the start of the tile.
  __device__ __forceinline__ static uint64_t at(uint32_t lower_half, uint32_t offset) {
    return uint64_t{kSwizzle128 | kEightRows} << 32 | (lower_half + offset / 16);
  }
  /// Where the part begins whose depth is columns [16 step, + 16).
  static constexpr uint32_t along_row(int step) { return step / 4 * panel_bytes(kRows) + step % 4 * 32; }
  /// Where the part begins whose depth is rows [16 step, + 16).
  static constexpr uint32_t down_rows(int step) { return step * 16 * kPanelRowBytes; }
};

/// Descriptors of parts of a tile with panels of 32 columns, whose rows have 64 bytes: the 16-byte chunks of a row are
/// exchanged by bits 1 and 2 of the row's index ("64-byte swizzle").
template <int kRows>
struct HalfPanelDescriptor {
  static constexpr uint32_t kSwizzle64 = 2u << 30;
  static constexpr uint32_t kRowBytes = kPanelRowBytes / 2;
  static constexpr uint32_t kPanelBytes = kRows * kRowBytes;
  static constexpr uint32_t kEightRows = 8 * kRowBytes / 16;

  __device__ __forceinline__ static uint32_t lower_half(uint32_t s_tile) {
    return s_tile >> 4 | kPanelBytes / 16 << 16;
  }
  /// The descriptor of the part that begins `offset` bytes after the start of the tile.
  __device__ __forceinline__ static uint64_t at(uint32_t lower_half, uint32_t offset) {
    return uint64_t{kSwizzle64 | kEightRows} << 32 | (lower_half + offset / 16);
  }
  /// Where the part begins whose depth is columns [16 step, + 16).
  static constexpr uint32_t along_row(int step) { return step / 2 * kPanelBytes + step % 2 * 32; }
  /// Where the part begins whose depth is rows [16 step, + 16).
  static constexpr uint32_t down_rows(int step) { return step * 16 * kRowBytes; }
};

}  // namespace flash_ext::sm90
