// The keys that a tile of queries visits, tile by tile in ascending order: a range, or the blocks that a block mask
// lists, always cut to the range.
#pragma once

#include "query_panel.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

struct KeyTile {
  int64_t begin = 0;
  int64_t end = 0;
  const int32_t* bitmap = nullptr;  // of the block that the tile lies in; null = every pair of it is visible
  int64_t block_key = 0;            // first key and first query of that block
  int64_t block_query = 0;

  int64_t size() const { return end - begin; }
};

class KeyTiles {
 public:
  KeyTiles(const AttentionParams& p, const Sequence& seq, const QueryRows& rows, const Interval& range)
      : blocks_(p.blocks), range_(range), cursor_(range.begin), stop_(range.end) {
    if (blocks_.offsets == nullptr || rows.count <= 0) return;
    const int64_t row_block = rows.query(0) / blocks_.block_m;
    tile_.block_query = row_block * blocks_.block_m;
    cursor_ = stop_ = 0;
    if (row_block >= blocks_.num_row_blocks) return;
    const int32_t* offsets = blocks_.offsets + seq.batch * blocks_.offsets_batch_stride +
                             rows.head(0) * blocks_.offsets_head_stride + row_block;
    next_block_ = clamp_index(offsets[0], 0, blocks_.num_blocks);
    end_block_ = clamp_index(offsets[1], next_block_, blocks_.num_blocks);
  }

  /// Moves to the next tile that holds keys; false at the end.
  bool next() {
    while (cursor_ >= stop_) {
      if (next_block_ >= end_block_) return false;
      enter_block(next_block_++);
    }
    tile_.begin = cursor_;
    tile_.end = min(cursor_ / kBlockN * kBlockN + kBlockN, stop_);
    cursor_ = tile_.end;
    return true;
  }

  const KeyTile& tile() const { return tile_; }

 private:
  void enter_block(int64_t entry) {
    tile_.block_key = blocks_.indices[entry] * blocks_.block_n;
    const Interval keys = intersect({tile_.block_key, tile_.block_key + blocks_.block_n}, range_);
    cursor_ = keys.begin;
    stop_ = keys.end;
    const int64_t id = min<int64_t>(blocks_.bitmap_ids[entry], blocks_.num_bitmaps - 1);
    tile_.bitmap = id < 0 ? nullptr : blocks_.bitmaps + id * blocks_.block_m * (blocks_.block_n / 32);
  }

  const BlockMaskParams& blocks_;
  Interval range_;
  int64_t cursor_;
  int64_t stop_;
  int64_t next_block_ = 0;
  int64_t end_block_ = 0;
  KeyTile tile_;
};

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
