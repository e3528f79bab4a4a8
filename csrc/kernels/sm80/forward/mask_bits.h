// A boolean mask as bits. A kernel that runs before the forward packs it (mask_bits.cuh), once for all heads and batch
// entries that share it.
#pragma once

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int kMaskRows = 32, kMaskKeys = 32;  // of a unit

/// Whether the mask shows some pair of a unit. Queries and keys that do not exist do not count.
enum MaskState : uint8_t { kMaskHides = 0, kMaskShows = 1 };

/// Units of 32 queries and 32 keys. Lane 4 g + t has one word of a unit: bit 8 k + 2 n + c is query 8 k + g and key
/// 8 n + 2 t + c, as the lane's accumulators lie.
struct MaskBits {
  uint32_t* words = nullptr;  // null: there is no mask
  uint8_t* states = nullptr;
  int key_units = 0;        // of a row of units; even, as a tile may have two
  int row_stride = 0;       // in units; 0 where all queries are the same
  int64_t head_stride = 0;  // 0 broadcasts, as does a batch_stride of 0
  int64_t batch_stride = 0;

  FLASH_EXT_HOST_DEVICE int64_t unit(int batch, int head, int row_unit, int key_unit) const {
    return batch * batch_stride + head * head_stride + static_cast<int64_t>(row_unit) * row_stride + key_unit;
  }
};

/// The sizes of the arrays of MaskBits.
struct MaskSizes {
  int64_t batch = 0, heads = 0;
  int64_t row_units = 0;  // whole tiles of the forward
  int64_t key_units = 0;

  explicit MaskSizes(const AttentionParams& p) {
    constexpr int64_t kTileRows = 128, kTileKeys = 64;
    if (!p.mask.data) return;
    batch = p.mask.batch_stride == 0 ? 1 : p.batch;
    heads = p.mask.head_stride == 0 ? 1 : p.heads_q;
    row_units = p.mask.row_stride == 0 ? 1 : (p.seqlen_q + kTileRows - 1) / kTileRows * (kTileRows / kMaskRows);
    key_units = (p.seqlen_k + kTileKeys - 1) / kTileKeys * (kTileKeys / kMaskKeys);
  }

  FLASH_EXT_HOST_DEVICE int64_t units() const { return batch * heads * row_units * key_units; }
  int64_t bytes() const { return units() * (kMaskRows * static_cast<int64_t>(sizeof(uint32_t)) + 1); }

  MaskBits views(void* memory) const {
    MaskBits bits;
    if (units() == 0) return bits;
    bits.words = static_cast<uint32_t*>(memory);
    bits.states = reinterpret_cast<uint8_t*>(bits.words + units() * kMaskRows);
    bits.key_units = static_cast<int>(key_units);
    bits.row_stride = static_cast<int>(row_units > 1 ? key_units : 0);
    bits.head_stride = heads > 1 ? row_units * key_units : 0;
    bits.batch_stride = batch > 1 ? heads * row_units * key_units : 0;
    return bits;
  }
};

}  // namespace flash_ext::sm80
