// Masks as a warp of the forward reads them (mask_bits.h).
#pragma once

#include "kernels/common/mask/bits.cuh"
#include "kernels/common/mask/block_lists.cuh"
#include "kernels/common/sequence.cuh"
#include "storage.cuh"

namespace flash_ext::sm80 {

/// The bitmap of a block, or a BlockBits::Id. `g_ids`: of the head.
__device__ __forceinline__ int id_of_block(const BlockBits& blocks, const int32_t* g_ids, int row, int column) {
  if (row >= blocks.rows || column >= blocks.columns) return BlockBits::kHidden;
  return __ldg(g_ids + static_cast<int64_t>(row) * blocks.columns + column);
}

/// The words of a unit of a block mask that has a grid of ids. Those of the next unit of the same block follow.
__device__ __forceinline__ const uint32_t* words_of_block(const BlockBits& blocks, const int32_t* g_ids, int row_unit,
                                                          int key_unit) {
  const int block_row = blocks.unit_rows.quotient(row_unit), block_column = blocks.unit_columns.quotient(key_unit);
  const int id = id_of_block(blocks, g_ids, block_row, block_column);
  const int rows = static_cast<int>(blocks.unit_rows.value), columns = static_cast<int>(blocks.unit_columns.value);
  const int64_t row = static_cast<int64_t>(id) * rows + row_unit - block_row * rows;  // counted over all bitmaps
  const int64_t unit = id < 0 ? kUniformUnits * id : row * columns + key_unit - block_column * columns;
  return blocks.words + unit * kMaskRows;
}

/// A lane's word of a unit of a block mask without a grid: its four rows, looked up in the lists.
__device__ __forceinline__ uint32_t word_of_lists(const BlockMaskRows& mask, int first_query, int first_key, int lane) {
  uint32_t word = 0;
#pragma unroll 1
  for (int k = 0; k < 4; ++k)
    word |= QuadOrder::part(mask.word(first_query + 8 * k + lane / 4, first_key), lane % 4) << 8 * k;
  return word;
}

/// The visibility bits of a warp's kRows rows and a tile of kKeys keys.
template <int kRows, int kKeys>
struct WarpVisibility {
  static constexpr int kUnits = kKeys / kMaskKeys;
  uint32_t words[kUnits];

  /// kAny: there may be both masks, or none, and blocks of any size. Else there is one, by a grid of ids if it is one
  /// of blocks, and the tile lies in one of them.
  template <bool kAny>
  __device__ __forceinline__ void load(const ForwardMasks& masks, const MasksOfTile& of_tile,
                                       const BlockMaskParams& mask, const Sequence& sequence, int first_query,
                                       int warp_row, int first_key, int lane) {
    static_assert(kUnits <= kUniformUnits, "a tile reads so many units of a block");
    const BlockBits& blocks = masks.blocks;
    const int row_unit = (first_query + warp_row) / kMaskRows, key_unit = first_key / kMaskKeys;
    const uint32_t* g_words = of_tile.words + (warp_row / kMaskRows * masks.pairs.row_stride + key_unit) * kMaskRows;
    if constexpr (!kAny) {
      if (blocks.ids) g_words = words_of_block(blocks, of_tile.ids, row_unit, key_unit);
    }
#pragma unroll
    for (int k = 0; k < kUnits; ++k)
      words[k] = !kAny || masks.pairs.words ? __ldg(g_words + k * kMaskRows + lane) : ~0u;
    if constexpr (kAny) {
      if (blocks.ids) {
#pragma unroll
        for (int k = 0; k < kUnits; ++k)
          words[k] &= __ldg(words_of_block(blocks, of_tile.ids, row_unit, key_unit + k) + lane);
      } else if (mask.offsets) {
#pragma unroll
        for (int k = 0; k < kUnits; ++k)
          words[k] &=
              word_of_lists(BlockMaskRows(mask, sequence), row_unit * kMaskRows, first_key + k * kMaskKeys, lane);
      }
    }
    // A word has 8 bits for each of four rows of a lane.
    if constexpr (kRows == 16) {
#pragma unroll
      for (int k = 0; k < kUnits; ++k) words[k] >>= warp_row & 16;
    }
  }

  /// Sets hidden scores to -inf.
  template <int kM, int kN>
  __device__ __forceinline__ void hide(float (&s)[kM][kN][4]) const {
    static_assert(kM == kRows / 16 && kN == kKeys / 8);
    uint32_t visible = ~0u;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) visible &= words[k];
    if (__all_sync(~0u, (kRows == 16 ? visible | 0xFFFF0000u : visible) == ~0u)) return;
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!QuadOrder::sees(words[n / 4] >> (16 * m + 8 * (e / 2)), n % 4, e % 2)) s[m][n][e] = -INFINITY;
  }
};

/// Whether the boolean mask leaves something of a tile.
template <int kRows, int kKeys>
__device__ __forceinline__ bool shows_tile(const MaskBits& bits, const Sequence& sequence, int first_query, int tile) {
  constexpr int kUnits = kKeys / kMaskKeys;
  if (tile * kUnits >= bits.key_units) return false;
  uint32_t states = 0;
#pragma unroll
  for (int row = 0; row < kRows / kMaskRows; ++row) {
    const uint8_t* const g_states =
        bits.states + bits.unit(sequence.batch, sequence.head, first_query / kMaskRows + row, tile * kUnits);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) states |= __ldg(g_states + k);
  }
  return states != 0;
}

/// Whether a grid of ids has a listed block in a tile.
template <int kRows, int kKeys>
__device__ __forceinline__ bool grid_shows_tile(const BlockBits& blocks, const int32_t* g_ids, int first_query,
                                                int tile) {
  const int last_row = blocks.block_m.quotient(first_query + kRows - 1);
  const int first_unit = tile * (kKeys / kMaskKeys), last_unit = first_unit + kKeys / kMaskKeys - 1;
  const int last_column = blocks.unit_columns.quotient(last_unit);
  for (int row = blocks.block_m.quotient(first_query); row <= last_row; ++row)
    for (int column = blocks.unit_columns.quotient(first_unit); column <= last_column; ++column)
      if (id_of_block(blocks, g_ids, row, column) != BlockBits::kHidden) return true;
  return false;
}

/// The same of lists without a grid.
template <int kRows, int kKeys>
__device__ __forceinline__ bool lists_show_tile(const BlockMaskRows& mask, int first_query, int tile) {
  const int block_m = static_cast<int>(mask.p.block_m), block_n = static_cast<int>(mask.p.block_n);
  const int num_rows = static_cast<int>(mask.p.num_row_blocks);
  const int last_row = min((first_query + kRows - 1) / block_m, num_rows - 1);
  const int first_column = tile * kKeys / block_n, last_column = (tile * kKeys + kKeys - 1) / block_n;
  for (int row = first_query / block_m; row <= last_row; ++row) {
    const BlockEntries entries = mask.entries(row);
    const int at = first_block_from(mask.p.indices, entries.begin, entries.end, first_column);
    if (at < entries.end && mask.p.indices[at] <= last_column) return true;
  }
  return false;
}

/// Bit k: whether the masks leave something of tile 32 group + k, for the kRows queries from first_query on.
template <int kRows, int kKeys>
__device__ __forceinline__ uint32_t visible_tiles(const ForwardMasks& masks, const MasksOfTile& of_tile,
                                                  const BlockMaskParams& mask, const Sequence& sequence,
                                                  int first_query, int group, int lane) {
  const int tile = 32 * group + lane;
  bool shows = !masks.pairs.words || shows_tile<kRows, kKeys>(masks.pairs, sequence, first_query, tile);
  if (shows && masks.blocks.ids) {
    shows = grid_shows_tile<kRows, kKeys>(masks.blocks, of_tile.ids, first_query, tile);
  } else if (shows && mask.offsets) {
    shows = lists_show_tile<kRows, kKeys>(BlockMaskRows(mask, sequence), first_query, tile);
  }
  return __ballot_sync(~0u, shows);
}

}  // namespace flash_ext::sm80
