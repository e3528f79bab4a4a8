// Boolean and block masks as the variants of the forward with bias, masks or dropout read them: the state and the
// visible pairs of 64 queries and 64 keys. Kernels that run before the forward write them (visibility.cuh).
#pragma once

#include <numeric>

#include "kernels/common/host_device.h"
#include "kernels/params.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Which pairs of 64 queries and 64 keys are visible. A query has four parts of 16 bits. Bit 2 n + c of part t stands
/// for key 8 n + 2 t + c, so that part t has the keys that lane t of four holds of a row of scores.
struct PairBits {
  struct alignas(8) Row {
    uint32_t x, y;
  } rows[kWarpgroupRows];
};

/// Indices of PairBits. The first two PairBits are constants: no pair is visible, and all pairs are.
constexpr int kNonePairs = 0, kAllPairs = 1, kFirstPairs = 2;

/// Which PairBits belong to which queries and keys.
struct ForwardVisibility {
  PairBits* bits = nullptr;
  int* entries = nullptr;  // index into bits for each group of queries and group of keys; null: all is visible
  int64_t batch_stride = 0, head_stride = 0;
  int row_stride = 0;  // 0 broadcasts, as do those of batch and head

  FLASH_EXT_HOST_DEVICE int* row(int batch, int head, int row_group) const {
    return entries + batch * batch_stride + head * head_stride + static_cast<int64_t>(row_group) * row_stride;
  }
};

/// How many groups of 64 rows, or keys, a block of this size may touch. A block begins at a multiple of its size.
inline int groups_touched(int64_t block) {
  const int64_t last_start = kKeyGroup - std::gcd<int64_t>(block, kKeyGroup);  // within a group
  return static_cast<int>((last_start + block - 1) / kKeyGroup + 1);
}

/// The sizes of the arrays of ForwardVisibility.
struct VisibilitySizes {
  int64_t groups;      // of keys, rounded up to an even number
  int64_t row_groups;  // of queries; 1 if all queries are the same
  int64_t batch, heads;
  bool by_pairs;                   // the bits are made pair by pair; else bitmaps of a block mask become bits
  bool by_lists;                   // pair by pair, and there is room only for what the lists of a block mask may touch
  int touched_rows, touched_keys;  // groups that one block may touch
  int64_t entries, pairs;

  explicit VisibilitySizes(const AttentionParams& p) {
    const auto distinct = [](int64_t size, int64_t stride, int64_t other) {
      return stride == 0 && other == 0 ? 1 : size;
    };
    const bool whole_blocks = p.blocks.block_m % kWarpgroupRows == 0 && p.blocks.block_n % kKeyGroup == 0;
    groups = (p.seqlen_k + 2 * kKeyGroup - 1) / (2 * kKeyGroup) * 2;
    row_groups = p.mask.row_stride == 0 && !p.blocks.offsets ? 1 : (p.seqlen_q + kWarpgroupRows - 1) / kWarpgroupRows;
    batch = distinct(p.batch, p.mask.batch_stride, p.blocks.offsets_batch_stride);
    heads = distinct(p.heads_q, p.mask.head_stride, p.blocks.offsets_head_stride);
    by_pairs = p.mask.data || !whole_blocks;
    const bool any = p.mask.data || p.blocks.offsets;
    const int64_t in_bitmap = (p.blocks.block_m / kWarpgroupRows) * (p.blocks.block_n / kKeyGroup);
    entries = any ? batch * heads * row_groups * groups : 0;
    touched_rows = groups_touched(p.blocks.block_m), touched_keys = groups_touched(p.blocks.block_n);
    // Heads may list the same blocks, but have PairBits of their own: other blocks that touch the same 64 queries may
    // differ between them.
    const int64_t in_lists = batch * heads * p.blocks.num_blocks * touched_rows * touched_keys;
    by_lists = by_pairs && !p.mask.data && in_lists < entries;
    pairs = !any ? 0 : kFirstPairs + (by_lists ? in_lists : by_pairs ? entries : p.blocks.num_bitmaps * in_bitmap);
  }

  int64_t bytes() const {
    return pairs * static_cast<int64_t>(sizeof(PairBits)) + entries * static_cast<int64_t>(sizeof(int));
  }

  ForwardVisibility views(char* memory) const {
    ForwardVisibility all;
    if (entries == 0) return all;
    const int64_t head = row_groups * groups;
    all.bits = reinterpret_cast<PairBits*>(memory);
    all.entries = reinterpret_cast<int*>(all.bits + pairs);
    all.batch_stride = batch > 1 ? heads * head : 0;
    all.head_stride = heads > 1 ? head : 0;
    all.row_stride = static_cast<int>(row_groups > 1 ? groups : 0);
    return all;
  }
};

}  // namespace flash_ext::sm90
