// A block mask by keys: for each key tile, the query tiles that see some of it, of all heads of a group. A kernel
// writes these lists from the rows of the mask.
//
// A key tile is made of two key groups of 64 keys. Each lies within one column of blocks, of 64 keys or of any
// multiple; the two may lie in different columns, of which an entry's queries may see one and not the other. So an
// entry says for each key group which pairs are visible.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/params.h"

namespace flash_ext {

constexpr int kListedKeyGroups = 2, kListedGroupKeys = 64;
constexpr int kListedKeys = kListedKeyGroups * kListedGroupKeys;  // of a key tile
constexpr int kBitsOfKeyGroup = kListedGroupKeys / 16 * 32;       // numbers of a set of bits (QueryLists::visible)

/// A step: a tile of queries of a head.
struct alignas(16) ListedQueries {
  int32_t head;                       // counted from the first of the group
  int32_t tile;                       // of queries
  int32_t visible[kListedKeyGroups];  // of a key group: index in QueryLists::visible; -1: all pairs are visible
};

struct QueryLists {
  int32_t batches = 0, heads_kv = 0, key_tiles = 0;  // of lists; batches, heads_kv: 1 where all are the same
  int32_t group = 1, query_tiles = 0, query_tiles_of_block = 1, key_groups_of_block = 1;
  int64_t most_steps = 0;          // upper bound on the steps of a list
  int64_t num_visible = 0;         // sets of bits of bitmaps, each of a query tile and a key group
  ListedQueries* steps = nullptr;  // (batches, heads_kv, key_tiles, most_steps)
  int32_t* counts = nullptr;       // (batches, heads_kv, key_tiles)
  // (num_visible + 1, 4, 32): a lane's bits, as it has scores of 16 of the 64 keys. The last set, hidden(), is zeros:
  // of key groups whose block is not listed.
  uint2* visible = nullptr;
  int64_t bytes = 0;

  QueryLists() = default;
  QueryLists(const AttentionParams& p, int query_tile, void* memory);

  FLASH_EXT_HOST_DEVICE_MEMBER int64_t lists() const { return int64_t{batches} * heads_kv * key_tiles; }
  FLASH_EXT_HOST_DEVICE_MEMBER int32_t hidden() const { return static_cast<int32_t>(num_visible); }
  FLASH_EXT_HOST_DEVICE_MEMBER int64_t index(int batch, int head_kv, int key_tile) const {
    return (int64_t{batches > 1 ? batch : 0} * heads_kv + (heads_kv > 1 ? head_kv : 0)) * key_tiles + key_tile;
  }
};

/// Launches the kernels that fill the lists.
void make_query_lists(const AttentionParams& p, const QueryLists& lists, cudaStream_t stream);

/// Parameters for the kernels that the lists drive: the main one tests for hidden pairs where there are bitmaps. Blocks
/// that are not made of whole key tiles hide key groups too, so the zeros of hidden() count as a bitmap. Lists and
/// scratch memory follow from the call's own parameters.
inline BackwardParams with_hidden_groups(const BackwardParams& p) {
  BackwardParams listed = p;
  if (p.blocks.block_n % kListedKeys != 0) ++listed.blocks.num_bitmaps;
  return listed;
}

}  // namespace flash_ext
