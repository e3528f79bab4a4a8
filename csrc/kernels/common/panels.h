// Tiles of 16-bit elements in shared memory as TMA writes them and tensor cores read them: panels of 64 columns (128
// bytes) and all rows, one after the other. Within a panel the 16-byte chunks of a row are exchanged by the last three
// bits of the row ("128-byte swizzle"), so eight rows of 128 bytes are the unit, to which tiles are aligned.
#pragma once

#include "kernels/common/host_device.h"

namespace flash_ext {

constexpr int kPanelColumns = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kSwizzleBytes = 8 * kPanelRowBytes;

FLASH_EXT_HOST_DEVICE constexpr int panels(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
FLASH_EXT_HOST_DEVICE constexpr int panel_bytes(int rows) { return rows * kPanelRowBytes; }
FLASH_EXT_HOST_DEVICE constexpr int tile_bytes(int rows, int columns) { return panels(columns) * panel_bytes(rows); }

}  // namespace flash_ext
