// Numbers for the tiles of all sequences that need no list. They serve kernels whose tiles all cost the same, so that
// their order does not matter, and index slots in workspaces.
//
// In dense batches every sequence has as many numbers as the longest one has tiles. Packed sequences whose grid would
// mostly be empty (lists_tiles()) are numbered by their rows in memory instead: a sequence that begins at row r has the
// numbers from r / block + sequence on, which leaves each sequence room for one partial tile. A warp finds the sequence
// of a number in cu_seqlens, 32 entries at a time.
#pragma once

#include "kernels/common/sequence.cuh"
#include "work_list.cuh"

namespace flash_ext {

/// Finds the last of `count` slots whose value is at most `value`; 0 if there is none. Values ascend. A whole warp
/// calls it, or all threads of a CTA that has fewer.
template <class ValueAt>
__device__ __forceinline__ int last_index_up_to(int64_t value, int count, ValueAt value_at) {
  const int lane = static_cast<int>(threadIdx.x) % 32, lanes = min(static_cast<int>(blockDim.x), 32);
  const uint32_t all_lanes = ~0u >> (32 - lanes);
  int first = 0;
  while (count > 1) {
    const int step = (count + lanes - 1) / lanes, index = lane * step;
    const uint32_t votes = __ballot_sync(all_lanes, index < count && value_at(first + index) <= value);
    const int steps = max(__popc(votes) - 1, 0);
    first += steps * step;
    count = min(step, count - steps * step);
  }
  return first;
}

/// The numbers of one side of a call. heads: work tiles that share a number. scale: rows of a tile per row in memory.
struct TileNumbers {
  WorkListSide side;
  LongDivisor block;
  int32_t scale;
  bool by_rows;  // else by the longest sequence
  int64_t tiles_of_longest;
  int64_t count;

  TileNumbers(const AttentionParams& p, WorkListSide side, int64_t block, int64_t heads, int64_t scale = 1)
      : side(side), block(block), scale(static_cast<int32_t>(scale)) {
    const bool keys = side == WorkListSide::kKeys;
    const bool packed = (keys ? p.seq.cu_seqlens_k : p.seq.cu_seqlens_q) != nullptr;
    const int64_t longest = scale * (keys ? p.seqlen_k : p.seqlen_q), rows = scale * (keys ? p.total_k : p.total_q);
    tiles_of_longest = tiles_of_rows(longest, block);
    by_rows = packed && lists_tiles(p.batch, longest, rows, block, heads);
    count = by_rows ? rows / block + p.batch : p.batch * tiles_of_longest;
  }

  /// The number of tile 0 of a sequence that begins at row `begin`.
  __device__ __forceinline__ int64_t first_of(int sequence, int64_t begin) const {
    return by_rows ? static_cast<int64_t>(block.quotient(scale * begin)) + sequence : sequence * tiles_of_longest;
  }

  /// Finds the sequence and the tile of a number. The tile may not exist: it may be negative or lie past the end of
  /// the sequence. To be called by a whole warp.
  __device__ __forceinline__ void find(const AttentionParams& p, int64_t number, int& sequence, int& tile) const {
    if (!by_rows) {
      sequence = static_cast<int>(number / tiles_of_longest);
      tile = static_cast<int>(number % tiles_of_longest);
      return;
    }
    const bool keys = side == WorkListSide::kKeys;
    const int32_t* const cu_seqlens = keys ? p.seq.cu_seqlens_k : p.seq.cu_seqlens_q;
    const int64_t total = keys ? p.total_k : p.total_q;
    const auto first = [&](int k) { return first_of(k, clamp_index(cu_seqlens[k], 0, total)); };
    sequence = last_index_up_to(number, static_cast<int>(p.batch), first);
    tile = static_cast<int>(number - first(sequence));
  }
};

}  // namespace flash_ext
