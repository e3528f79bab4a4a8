// A boolean mask of query-key pairs for the pipelined loop: a state for each tile (VisibilityTiles), and words of bits
// in the order in which lanes hold scores. A lane reads its word from memory, without shared memory between.
#pragma once

#include "kernels/common/backward/visibility.cuh"
#include "kernels/common/mask/bits.cuh"

namespace flash_ext::sm90 {

/// Computes word (chunk, lane) of a tile: bits of the lane's keys g and g + 8 of a chunk of 16, with g = lane / 4. Bits
/// of key g lie as in TransposedOrder, bits of key g + 8 eight below. `chunks`: bits of keys, by queries.
template <int kBlockM, int kChunks>
__device__ __forceinline__ uint32_t word_of_lane(const uint16_t (&chunks)[kBlockM][kChunks], int word) {
  static_assert(kBlockM == 64, "eight bits of queries");
  const int chunk = word / 32, key = word % 32 / 4, query = 2 * (word % 4);
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < kBlockM / 8; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t keys = chunks[8 * n + query + c][chunk] >> key;
      bits |= (keys & 1u) << TransposedOrder::bit(n, c) | (keys >> 8 & 1u) << (TransposedOrder::bit(n, c) - 8);
    }
  return bits;
}

/// A CTA makes the words and the state of one tile, as mask_tiles_kernel does. static, as backward_row_terms_kernel is.
template <int kBlockM, int kBlockN>
static __global__ void __launch_bounds__(kVisibilityThreads)
    mask_words_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ VisibilityTiles tiles) {
  constexpr int kChunks = kBlockN / 16;  // of a row of the mask, 16 bytes each
  __shared__ uint16_t s_chunks[kBlockM][kChunks];
  const VisibilityTileOfCta tile(tiles);
  const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
  const MaskRows mask(p.mask, Sequence(p, tile.batch, tile.head));
  bool any = false, all = true;
  read_mask_tile<kBlockM, kBlockN>(
      mask, tile.query_tile * kBlockM, tile.key_tile * kBlockN, seqlen_k, any, all, [&](int i) { return i < seqlen_q; },
      [&](int row, int chunk, uint16_t bits) { s_chunks[row][chunk] = bits; });
  uint32_t* const g_words = tile.words(tiles);
#pragma unroll 1
  for (int word = threadIdx.x; word < kChunks * 32; word += kVisibilityThreads)
    g_words[word] = word_of_lane(s_chunks, word);
  if (threadIdx.x == 0) tile.state(tiles) = !any ? kTileHidden : all ? kTileVisible : kTileMasked;
}

}  // namespace flash_ext::sm90
