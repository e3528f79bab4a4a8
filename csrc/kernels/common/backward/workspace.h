// Scratch memory of the backward. Query rows lie in it tile by tile, each sequence padded to whole tiles, so that every
// tile of every head is aligned and shares no memory with another. Steps of an anchored key tile begin between tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/dropout/philox.h"
#include "kernels/common/host_device.h"
#include "kernels/common/lengths.h"
#include "kernels/common/scheduler/tile_numbers.cuh"
#include "kernels/params.h"
#include "order.h"
#include "query_lists.h"

namespace flash_ext {

constexpr int kDqWarps = 8;          // at most so many share a tile of dQ
constexpr int kDqPlaneColumns = 16;  // of dQ^T, those of a warp

/// Whether masks or a bias may hide a pair that is visible by window and lengths.
FLASH_EXT_HOST_DEVICE bool hides_pairs(const AttentionParams& p) {
  return p.bias.data || p.mask.data || p.blocks.offsets;
}

/// Visibility by masks, prepared for tiles of block_m queries and block_n keys: once for all heads and tiles that see
/// the same part of a mask.
struct VisibilityTiles {
  int batches = 0, heads = 0, key_tiles = 0, query_tiles = 0;  // of states; 1 where all are the same
  int word_batches = 0, word_heads = 0, word_query_tiles = 0;  // of words
  int words_per_tile = 0;
  uint8_t* states = nullptr;  // (batches, heads, key_tiles, query_tiles): a TileState
  uint32_t* words = nullptr;  // (word_batches, word_heads, word_query_tiles, key_tiles, block_n / 32, block_m), of mask

  VisibilityTiles(const AttentionParams& p, int block_m, int block_n) {
    if (!p.mask.data && !p.blocks.offsets) return;
    const auto count = [](bool varies, int64_t size) { return static_cast<int>(varies ? size : 1); };
    const int64_t all_query_tiles = (p.seqlen_q + block_m - 1) / block_m;
    key_tiles = static_cast<int>((p.seqlen_k + block_n - 1) / block_n);
    if (p.mask.data) {
      word_batches = count(p.mask.batch_stride != 0, p.batch);
      word_heads = count(p.mask.head_stride != 0, p.heads_q);
      word_query_tiles = count(p.mask.row_stride != 0, all_query_tiles);
      words_per_tile = block_m * (block_n / 32);
    }
    const bool blocks = p.blocks.offsets;
    batches = std::max(word_batches, count(blocks && p.blocks.offsets_batch_stride != 0, p.batch));
    heads = std::max(word_heads, count(blocks && p.blocks.offsets_head_stride != 0, p.heads_q));
    query_tiles = std::max(word_query_tiles, count(blocks, all_query_tiles));
  }

  int64_t num_states() const { return int64_t{batches} * heads * key_tiles * query_tiles; }
  int64_t num_words() const {
    return int64_t{word_batches} * word_heads * word_query_tiles * key_tiles * words_per_tile;
  }

  /// States of the query tiles of a key tile.
  FLASH_EXT_HOST_DEVICE const uint8_t* states_of(int batch, int head, int key_tile) const {
    const int64_t row = int64_t{batches > 1 ? batch : 0} * heads + (heads > 1 ? head : 0);
    return states + (row * key_tiles + key_tile) * query_tiles;
  }
  FLASH_EXT_HOST_DEVICE int state_of(int batch, int head, int key_tile, int query_tile) const {
    return states_of(batch, head, key_tile)[query_tiles > 1 ? query_tile : 0];
  }
  FLASH_EXT_HOST_DEVICE const uint32_t* words_of(int batch, int head, int query_tile, int key_tile) const {
    const int64_t row = int64_t{word_batches > 1 ? batch : 0} * word_heads + (word_heads > 1 ? head : 0);
    return words +
           ((row * word_query_tiles + (word_query_tiles > 1 ? query_tile : 0)) * key_tiles + key_tile) * words_per_tile;
  }
};

/// Which sums of dQ the main kernel zeroes, and what it has zeroed.
struct DqZeroingPlan : DqZeroingOrder {
  int32_t* zeroed_parts = nullptr;  // (key heads): a part is what a warp zeroes for a position
};

/// How the kernel that stores dQ learns that the sums of a key head are complete (dq_completion.cuh).
struct DqCompletionPlan {
  int32_t* finished_warps = nullptr;  // (key heads): a warp counts once for each key tile
  int32_t warps_of_head = 0;          // that must count; 0: that kernel waits for the whole main kernel

  FLASH_EXT_HOST_DEVICE_MEMBER bool is_used() const { return warps_of_head > 0; }
};

constexpr int kLargeParts = 8;  // of a tile of rows: eight flags are read at once

struct BackwardWorkspace {
  int64_t tiles_per_head = 0;
  float* lse = nullptr;  // (heads_q, tiles_per_head, block_m), in units of scores; inf where a row has no weights
  float* minus_delta = nullptr;  // (heads_q, tiles_per_head, block_m): dlse - rowsum(dO * O)
  float* dq = nullptr;  // (heads_q, tiles_per_head, block_m * head_dim) in the order of dq_store.cuh; or dq_of_plane()
  int32_t* turns = nullptr;           // (heads_q, tiles_per_head, kDqWarps): additions to a tile of dQ so far
  int32_t* ticket = nullptr;          // (1): CTAs started so far; null: the kernel has a counter of its own
  int32_t* has_non_finite = nullptr;  // (heads_q, tiles_per_head): whether a tile of q or dO holds Inf or NaN
  uint8_t* large = nullptr;  // (heads_q, tiles_per_head, kLargeParts): whether a row has a LargeLse; not of floats
  DqZeroingPlan zeroing;
  DqCompletionPlan completion;
  VisibilityTiles visibility;
  QueryLists query_lists;  // where a kernel is driven by them
  // D, dS, dQ and dK are stored divided by this factor of dropout's kept weights, so that one product gives dP - D. It
  // is 1 without dropout, and where nothing is kept.
  float keep_scale = 1.0f;
  bool first_turns_store = false;  // the first addition to a tile of dQ overwrites it: nobody zeroes the tile
  TileNumbers row_tiles;           // numbers of query tiles, for the kernels before and after the main one
  int64_t bytes = 0;

  BackwardWorkspace(const BackwardParams& p, int block_m, int block_n, int head_dim, void* memory,
                    bool has_ticket = true)
      : visibility(p, block_m, block_n), row_tiles(p, WorkListSide::kQueries, block_m, p.heads_q) {
    if (const double scale = p.dropout.rule.keep_scale; scale > 0) keep_scale = static_cast<float>(scale);
    tiles_per_head = p.seq.cu_seqlens_q ? p.total_q / block_m + p.batch : p.batch * tiles_of(p.seqlen_q, block_m);
    const int64_t tiles = p.heads_q * tiles_per_head;
    const int64_t rows = tiles * block_m;
    lse = take<float>(memory, rows);
    // A step of an anchored key tile may run past the last row: it reads what is hidden and adds zeros. After lse it
    // reads from minus_delta, which must follow.
    minus_delta = take<float>(memory, rows + block_m);
    if (p.dq.data) dq = take<float>(memory, rows * head_dim + block_m * kDqPlaneColumns);
    if (takes_turns(p)) {
      turns = take<int32_t>(memory, tiles * kDqWarps);
      if (has_ticket) ticket = take<int32_t>(memory, 1);
    }
    if (p.dtype != DType::kFloat32 || p.allow_tf32) large = take<uint8_t>(memory, tiles * kLargeParts);
    if (hides_pairs(p)) has_non_finite = take<int32_t>(memory, tiles);
    zeroing.zeroed_parts = take<int32_t>(memory, int64_t{p.batch} * p.heads_kv);
    completion.finished_warps = take<int32_t>(memory, int64_t{p.batch} * p.heads_kv);
    visibility.states = take<uint8_t>(memory, visibility.num_states());
    visibility.words = take<uint32_t>(memory, visibility.num_words());
  }

  /// Leaves sums of dQ to the main kernel, where it can zero them and say when they are complete: if all sequences have
  /// the same lengths, no key tile is split and additions take no turns. Then each position has a key tile.
  /// `tile_warps`: that add to dQ for a key tile; 0: none of them counts. `at_once`: positions that run at the same
  /// time. `reserved`: the first positions, which zero nothing (dq_zeroing.cuh).
  void leave_dq_to_main_kernel(const BackwardParams& p, const BackwardOrder& main_order, int tile_warps,
                               int64_t at_once, int64_t reserved) {
    if (!dq || turns || !has_equal_lengths(p) || main_order.splits() > 1) return;
    static_cast<DqZeroingOrder&>(zeroing) = dq_zeroing_order(main_order, at_once, reserved);
    completion.warps_of_head = static_cast<int32_t>(main_order.key_tiles) * tile_warps;
  }

  /// Lets the first turn at a tile of dQ overwrite it, in kernels where every key tile that a query tile sees adds to
  /// it. Key tiles that a mask or bias hides do not: they pass their turns.
  void let_first_turns_store(const BackwardParams& p) { first_turns_store = turns && !hides_pairs(p); }

  static bool takes_turns(const BackwardParams& p) { return p.deterministic && p.dq.data && p.seqlen_q > 0; }

  /// The index of the sums of dQ^T of a row; `term`, a multiple of 8, is the number of the row's term. A head has
  /// `planes` planes of all its rows, each of kDqPlaneColumns columns, so that an addition may begin at any eighth row.
  FLASH_EXT_HOST_DEVICE int64_t dq_of_plane(int64_t term, int64_t head, int plane, int planes, int block_m) const {
    return (term + (head * (planes - 1) + plane) * tiles_per_head * block_m) * kDqPlaneColumns;
  }

  static FLASH_EXT_HOST_DEVICE int64_t tiles_of(int64_t rows, int block_m) { return (rows + block_m - 1) / block_m; }

  /// Index of tile `tile` of a sequence in the arrays above. Packed sequences begin at q_begin / block_m + batch, which
  /// leaves each of them room for one partial tile.
  FLASH_EXT_HOST_DEVICE int64_t tile_index(const AttentionParams& p, int64_t batch, int64_t head, int64_t q_begin,
                                           int64_t tile, int block_m) const {
    const int64_t first = p.seq.cu_seqlens_q ? q_begin / block_m + batch : batch * tiles_of(p.seqlen_q, block_m);
    return head * tiles_per_head + first + tile;
  }

 private:
  template <class T>
  T* take(void* memory, int64_t count) {
    T* const taken = reinterpret_cast<T*>(static_cast<char*>(memory) + bytes);
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return taken;
  }
};

}  // namespace flash_ext
