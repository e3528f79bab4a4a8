// Masks as bits in the order of accumulators. Kernels that run before the forward write them (mask_bits.cuh), once for
// all heads and batch entries that share a mask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/divisor.h"
#include "kernels/common/host_device.h"
#include "kernels/params.h"
#include "shape.h"

namespace flash_ext::sm80 {

/// Whether the mask shows some pair of a unit. Queries and keys that do not exist do not count.
enum MaskState : uint8_t { kMaskHides = 0, kMaskShows = 1 };

/// A boolean mask, in units of 32 queries and 32 keys. Lane 4 g + t has one word of a unit: bit 8 k + 2 n + c is query
/// 8 k + g and key 8 n + 2 t + c, as the lane's accumulators lie.
struct MaskBits {
  uint32_t* words = nullptr;  // null: there is no boolean mask
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

/// In the words of a block mask, units that hide all and as many that show all stand before those of the bitmaps: as
/// many as a tile reads. So the id of any block leads to words, and the loop has no branch for full and hidden blocks.
constexpr int kUniformUnits = 2, kAllUniformUnits = 2 * kUniformUnits;

/// A block mask as a grid: for each block its bitmap, and the units of each bitmap as MaskBits has them.
struct BlockBits {
  enum Id : int32_t { kFull = -1, kHidden = -2 };  // instead of a bitmap: how many times kUniformUnits before `words`

  int32_t* ids = nullptr;     // (batch|1, heads|1, rows, columns); null: there is no grid (has_block_grid())
  uint32_t* words = nullptr;  // (bitmaps, block_m / 32, block_n / 32, 32)
  int rows = 0, columns = 0;  // of blocks
  Divisor block_m{1}, unit_rows{1}, unit_columns{1};  // of a block: queries, units along the queries and the keys
  int64_t head_stride = 0;                            // of ids; 0 broadcasts, as does a batch_stride of 0
  int64_t batch_stride = 0;

  FLASH_EXT_HOST_DEVICE const int32_t* ids_of(int batch, int head) const {
    return ids + batch * batch_stride + head * head_stride;
  }
};

inline BlockGridAsked grid_asked(const AttentionParams& p) {
  return {p.blocks.block_m, p.blocks.block_n, p.seqlen_k, p.head_dim};
}

/// Whether a call has a grid of ids. Else the forward looks blocks up in the lists. So it does where each packed
/// sequence has lists of its own, since each would need a grid for the longest one.
inline bool has_block_grid(const AttentionParams& p) {
  const bool packed = p.seq.cu_seqlens_q || p.seq.cu_seqlens_k;
  return p.blocks.offsets && allows_grid(grid_asked(p)) && !(packed && p.blocks.offsets_batch_stride != 0);
}

/// The sizes of the arrays of BlockBits.
struct BlockSizes {
  int64_t batch = 0, heads = 0, rows = 0, columns = 0;
  int64_t units = 0;  // uniform ones, and those of all bitmaps

  explicit BlockSizes(const AttentionParams& p) {
    if (!has_block_grid(p)) return;
    const BlockMaskParams& blocks = p.blocks;
    batch = blocks.offsets_batch_stride == 0 ? 1 : p.batch;
    heads = blocks.offsets_head_stride == 0 ? 1 : p.heads_q;
    rows =
        std::min(blocks.num_row_blocks, (p.seqlen_q + blocks.block_m - 1) / blocks.block_m);  // max_seqlen is a bound
    columns = (p.seqlen_k + blocks.block_n - 1) / blocks.block_n;
    units = kAllUniformUnits + blocks.num_bitmaps * (blocks.block_m / kMaskRows) * (blocks.block_n / kMaskKeys);
  }

  FLASH_EXT_HOST_DEVICE int64_t ids() const { return batch * heads * rows * columns; }
  /// Words come first: a warp reads a unit as one line.
  int64_t bytes() const { return (units * kMaskRows + ids()) * static_cast<int64_t>(sizeof(uint32_t)); }

  BlockBits views(const BlockMaskParams& blocks, void* memory) const {
    BlockBits bits;
    if (units == 0) return bits;
    auto* const words = static_cast<uint32_t*>(memory);
    bits.words = words + kAllUniformUnits * kMaskRows;
    bits.ids = reinterpret_cast<int32_t*>(words + units * kMaskRows);
    bits.rows = static_cast<int>(rows);
    bits.columns = static_cast<int>(columns);
    bits.block_m = Divisor(blocks.block_m);
    bits.unit_rows = Divisor(blocks.block_m / kMaskRows);
    bits.unit_columns = Divisor(blocks.block_n / kMaskKeys);
    bits.head_stride = heads > 1 ? rows * columns : 0;
    bits.batch_stride = batch > 1 ? heads * rows * columns : 0;
    return bits;
  }
};

/// The masks of a call.
struct ForwardMasks {
  MaskBits pairs;
  BlockBits blocks;
};

}  // namespace flash_ext::sm80
