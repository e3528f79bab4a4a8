// The kernels that write masks as bits (mask_bits.h).
#pragma once

#include "kernels/common/mask/block_lists.cuh"
#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "mask_bits.h"

namespace flash_ext::sm80 {

constexpr int kMaskBitsThreads = 256;

/// A lane's word of a unit, from words in the order of the keys, of which lane i has that of row i.
__device__ __forceinline__ uint32_t word_of_lane(uint32_t row_word, int lane) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) bits |= QuadOrder::part(__shfl_sync(~0u, row_word, 8 * k + lane / 4), lane % 4) << 8 * k;
  return bits;
}

/// A warp packs a unit of 32 queries and 32 keys; each lane reads a row of it. Rows past the last query count as rows
/// that see all keys. So they get a stabiliser, and the forward need not treat them as rows that have seen no key yet.
static __global__ void __launch_bounds__(kMaskBitsThreads)
    mask_bits_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskSizes sizes,
                     const __grid_constant__ MaskBits to) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * kMaskBitsThreads + threadIdx.x) / 32;
  if (unit >= sizes.units()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_unit = unit / sizes.key_units % sizes.row_units, head = unit / sizes.key_units / sizes.row_units;
  const int first_key = static_cast<int>(unit % sizes.key_units) * kMaskKeys;
  const int64_t i = p.mask.row_stride == 0 ? 0 : row_unit * kMaskRows + lane;
  const int seqlen_k = static_cast<int>(p.seqlen_k);
  uint32_t word = ~0u;
  bool shows = false;
  if (i < p.seqlen_q) {
    const Sequence sequence(p, static_cast<int>(head / sizes.heads), static_cast<int>(head % sizes.heads));
    word = mask_word(MaskRows(p.mask, sequence), static_cast<int>(i), first_key, seqlen_k);
    shows = word != 0;
  }
  to.words[unit * kMaskRows + lane] = word_of_lane(word, lane);
  const bool any = __any_sync(~0u, shows);
  if (lane == 0) to.states[unit] = any ? kMaskShows : kMaskHides;
}

inline MaskBits make_mask_bits(const AttentionParams& p, void* memory, cudaStream_t stream) {
  const MaskSizes sizes(p);
  const MaskBits bits = sizes.views(memory);
  constexpr int64_t kUnitsOfCta = kMaskBitsThreads / 32;
  const dim3 ctas = grid_of((sizes.units() + kUnitsOfCta - 1) / kUnitsOfCta);
  launch("sm80/mask_bits", mask_bits_kernel, {ctas, dim3(kMaskBitsThreads)}, stream, p, sizes, bits);
  return bits;
}

/// A thread finds the bitmap of a block.
static __global__ void __launch_bounds__(kMaskBitsThreads)
    block_ids_kernel(const __grid_constant__ BlockMaskParams mask, const __grid_constant__ BlockSizes sizes,
                     int32_t* g_ids) {
  const int64_t flat = static_cast<int64_t>(blockIdx.x) * kMaskBitsThreads + threadIdx.x;
  if (flat >= sizes.ids()) return;
  const int column = static_cast<int>(flat % sizes.columns), row = static_cast<int>(flat / sizes.columns % sizes.rows);
  const int64_t head = flat / sizes.columns / sizes.rows;
  const int32_t* const g_offsets =
      mask.offsets + head / sizes.heads * mask.offsets_batch_stride + head % sizes.heads * mask.offsets_head_stride;
  const BlockEntries entries = entries_of_row(g_offsets, row, static_cast<int>(mask.num_blocks));
  const int at = first_block_from(mask.indices, entries.begin, entries.end, column);
  const bool listed = at < entries.end && mask.indices[at] == column;
  g_ids[flat] = !listed ? BlockBits::kHidden : max(bitmap_of(mask, at), static_cast<int>(BlockBits::kFull));
}

/// A warp packs a unit of a bitmap; each lane reads a row of it. The first warps write the uniform units.
static __global__ void __launch_bounds__(kMaskBitsThreads)
    block_words_kernel(const __grid_constant__ BlockMaskParams mask, int64_t units, uint32_t* g_words) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * kMaskBitsThreads + threadIdx.x) / 32;
  if (unit >= units) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t of_bitmaps = unit - kAllUniformUnits, columns = mask.block_n / kMaskKeys;
  uint32_t word = unit < kUniformUnits ? 0u : ~0u;
  if (of_bitmaps >= 0) {
    const int64_t row = of_bitmaps / columns * kMaskRows + lane;  // counted over all bitmaps
    word = static_cast<uint32_t>(mask.bitmaps[row * columns + of_bitmaps % columns]);
  }
  g_words[unit * kMaskRows + lane] = word_of_lane(word, lane);
}

inline BlockBits make_block_bits(const AttentionParams& p, void* memory, cudaStream_t stream) {
  const BlockSizes sizes(p);
  const BlockBits bits = sizes.views(p.blocks, memory);
  const auto ctas = [](int64_t threads) { return grid_of((threads + kMaskBitsThreads - 1) / kMaskBitsThreads); };
  launch("sm80/block_ids", block_ids_kernel, {ctas(sizes.ids()), dim3(kMaskBitsThreads)}, stream, p.blocks, sizes,
         bits.ids);
  launch("sm80/block_words", block_words_kernel, {ctas(sizes.units * 32), dim3(kMaskBitsThreads)}, stream, p.blocks,
         sizes.units, static_cast<uint32_t*>(memory));
  return bits;
}

}  // namespace flash_ext::sm80
