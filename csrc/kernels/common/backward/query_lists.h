// A block mask by keys: for each key tile, the query tiles that see some of it, of all heads of a group. A kernel
// writes these lists from the rows of the mask.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/common/host_device.h"
#include "kernels/params.h"

namespace flash_ext {

/// A step: a tile of queries of a head.
struct alignas(16) ListedQueries {
  int32_t head;     // counted from the first of the group
  int32_t tile;     // of queries
  int32_t visible;  // index in QueryLists::visible of its bits; -1: all pairs are visible
  int32_t spare;
};

struct QueryLists {
  int32_t batches = 0, heads_kv = 0, key_tiles = 0;  // of lists; batches, heads_kv: 1 where all are the same
  int32_t group = 1, query_tiles = 0, query_tiles_of_block = 1;
  int64_t most_steps = 0;  // upper bound on the steps of a list
  int64_t num_visible = 0;
  ListedQueries* steps = nullptr;  // (batches, heads_kv, key_tiles, most_steps)
  int32_t* counts = nullptr;       // (batches, heads_kv, key_tiles)
  uint2* visible = nullptr;        // (num_visible, block_n / 16, 32): a lane's bits, as it has scores of 16 keys
  int64_t bytes = 0;

  QueryLists() = default;
  QueryLists(const AttentionParams& p, int query_tile, int key_tile, void* memory);

  FLASH_EXT_HOST_DEVICE_MEMBER int64_t lists() const { return int64_t{batches} * heads_kv * key_tiles; }
  FLASH_EXT_HOST_DEVICE_MEMBER int64_t index(int batch, int head_kv, int key_tile) const {
    return (int64_t{batches > 1 ? batch : 0} * heads_kv + (heads_kv > 1 ? head_kv : 0)) * key_tiles + key_tile;
  }
};

/// Launches the kernels that fill the lists.
void make_query_lists(const AttentionParams& p, const QueryLists& lists, int key_tile, cudaStream_t stream);

}  // namespace flash_ext
