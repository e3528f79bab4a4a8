// Visibility under masks, prepared once for the main kernel of the backward: the state of each tile, so that hidden
// tiles are never loaded, and boolean masks as bits, which the main kernel reads 16 bytes at a time.
#pragma once

#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/tile.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/cp_async.h"
#include "workspace.h"

namespace flash_ext {

/// What the masks leave of a tile. Pairs beyond the lengths do not count.
enum TileState : uint8_t { kTileHidden = 0, kTileMasked = 1, kTileVisible = 2 };

/// The state of a tile from the lists of a block mask alone: a block with a bitmap counts as partial.
__device__ __forceinline__ TileState block_mask_state(const BlockMaskRows& blocks, int first_query, int first_key,
                                                      int end_query, int end_key) {
  const BlockMaskParams& p = blocks.p;
  const int block_m = static_cast<int>(p.block_m), block_n = static_cast<int>(p.block_n);
  const int first_column = first_key / block_n, last_column = (end_key - 1) / block_n;
  bool any = false, all = true;
  for (int row = first_query / block_m; row <= (end_query - 1) / block_m; ++row) {
    if (row >= p.num_row_blocks) return any ? kTileMasked : kTileHidden;
    const BlockEntries entries = blocks.entries(row);
    int at = first_block_from(p.indices, entries.begin, entries.end, first_column), found = 0;
    for (; at < entries.end && p.indices[at] <= last_column; ++at, ++found) all &= p.bitmap_ids[at] < 0;
    any |= found > 0;
    all &= found == last_column - first_column + 1;
  }
  return !any ? kTileHidden : all ? kTileVisible : kTileMasked;
}

constexpr int kVisibilityThreads = 128;

/// The tile whose words and state a CTA computes.
struct VisibilityTileOfCta {
  int query_tile, key_tile, head, batch;

  __device__ __forceinline__ explicit VisibilityTileOfCta(const VisibilityTiles& tiles) {
    query_tile = blockIdx.x % tiles.query_tiles, key_tile = blockIdx.x / tiles.query_tiles % tiles.key_tiles;
    const int rest = blockIdx.x / tiles.query_tiles / tiles.key_tiles;
    head = rest % tiles.heads, batch = rest / tiles.heads;
  }
  __device__ __forceinline__ uint32_t* words(const VisibilityTiles& tiles) const {
    return const_cast<uint32_t*>(tiles.words_of(batch, head, query_tile, key_tile));
  }
  __device__ __forceinline__ uint8_t& state(const VisibilityTiles& tiles) const {
    return const_cast<uint8_t*>(tiles.states_of(batch, head, key_tile))[query_tile];
  }
};

/// Reads a tile of a mask: calls store(row, chunk, bits) for each 16 keys of a row, with bits of 0 for queries for
/// which exists(i) is false. `any` and `all` then say, in all threads, whether the mask leaves any or all of the pairs
/// that exist; `all` must be true before. The whole CTA calls it.
template <int kBlockM, int kBlockN, class Exists, class Store>
__device__ __forceinline__ void read_mask_tile(const MaskRows& mask, int first_query, int first_key, int seqlen_k,
                                               bool& any, bool& all, Exists exists, Store store) {
  constexpr int kChunks = kBlockN / 16;  // of a row of the mask, 16 bytes each
  any = false;
#pragma unroll 1
  for (int flat = threadIdx.x; flat < kBlockM * kChunks; flat += kVisibilityThreads) {
    const int row = flat / kChunks, chunk = flat % kChunks;
    const int i = first_query + row, j = first_key + 16 * chunk;
    uint32_t bits = 0;
    if (exists(i) && j < seqlen_k) {
      bits = mask_bits(mask, i, j, seqlen_k);
      any |= bits != 0;
      all &= bits == (0xFFFFu >> max(j + 16 - seqlen_k, 0));
    }
    store(row, chunk, static_cast<uint16_t>(bits));
  }
  any = __syncthreads_or(any);
  all = __syncthreads_and(all);
}

/// Writes the words and the state of a tile, one tile in each CTA. It is static, as backward_row_terms_kernel is.
template <int kBlockM, int kBlockN>
static __global__ void __launch_bounds__(kVisibilityThreads)
    mask_tiles_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ VisibilityTiles tiles) {
  const VisibilityTileOfCta tile(tiles);
  const int first_query = tile.query_tile * kBlockM, first_key = tile.key_tile * kBlockN;
  const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
  const Sequence sequence(p, tile.batch, tile.head);
  bool any = true, all = true;
  if (p.mask.data) {
    const MaskRows mask(p.mask, sequence);
    auto* const g_halves = reinterpret_cast<uint16_t*>(tile.words(tiles));
    read_mask_tile<kBlockM, kBlockN>(
        mask, first_query, first_key, seqlen_k, any, all, [&](int i) { return i < seqlen_q || mask.row_stride == 0; },
        [&](int row, int chunk, uint16_t bits) { g_halves[(chunk / 2 * kBlockM + row) * 2 + chunk % 2] = bits; });
  }
  if (threadIdx.x != 0) return;
  TileState state = !any ? kTileHidden : all ? kTileVisible : kTileMasked;
  if (p.blocks.offsets && state != kTileHidden) {
    const TileState of_blocks =
        block_mask_state(BlockMaskRows(p.blocks, sequence), first_query, first_key,
                         min(first_query + kBlockM, seqlen_q), min(first_key + kBlockN, seqlen_k));
    if (of_blocks < state) state = of_blocks;
  }
  tile.state(tiles) = state;
}

/// Loads the words of a tile into shared memory, by the first kThreads of the CTA: word (group of 32 keys, query). It
/// does not wait for the copies.
template <int kThreads, int kBlockM, int kBlockN>
__device__ __forceinline__ void load_words(uint32_t s_words, const AttentionParams& p, const VisibilityTiles& tiles,
                                           const Sequence& sequence, int query_tile, int key_tile) {
  constexpr int kWords = kBlockM * (kBlockN / 32);
  const uint32_t* const g_words =
      p.mask.data ? tiles.words_of(sequence.batch, sequence.head, query_tile, key_tile) : nullptr;
  if (!p.blocks.offsets) {
#pragma unroll 1
    for (int k = threadIdx.x; k < kWords / 4; k += kThreads) ptx::cp_async_16(s_words + 16 * k, g_words + 4 * k);
    return;
  }
  const BlockMaskRows blocks(p.blocks, sequence);
#pragma unroll 1
  for (int k = threadIdx.x; k < kWords; k += kThreads) {
    const int i = query_tile * kBlockM + k % kBlockM, j = key_tile * kBlockN + k / kBlockM * 32;
    uint32_t word = g_words ? g_words[k] : ~0u;
    if (i >= sequence.seqlen_q || j >= sequence.seqlen_k) word = 0;
    store_shared(s_words + 4 * k, word ? word & blocks.word(i, j) : 0u);
  }
}

}  // namespace flash_ext
