// The order of tiles whose costs lie on the device, for example the number of blocks that a block mask lists for each.
// Heads form sections whose other side fits into L2; within a section the most expensive tiles come first. A kernel
// writes the order as a work list (work_list.cuh), with one entry for each tile of each head.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "heads_in_l2.h"
#include "work_list.cuh"

namespace flash_ext {

/// The costs of tiles: counts, or offsets whose differences are the counts.
struct TileCosts {
  const int32_t* counts;
  bool are_offsets;
  int64_t batch_stride, head_stride;  // of counts; 0 broadcasts
  int32_t tiles_of_count;             // neighbouring tiles that share one count
  int32_t heads_of_tile;              // a tile's cost is the sum over so many heads that have counts

  __device__ __forceinline__ int of(int batch, int head, int tile) const {
    int sum = 0;
    for (int k = 0; k < heads_of_tile; ++k) {
      const int32_t* const at =
          counts + batch * batch_stride + (head * heads_of_tile + k) * head_stride + tile / tiles_of_count;
      sum += are_offsets ? at[1] - at[0] : at[0];
    }
    return sum;
  }
};

struct LongestFirst {
  TileCosts costs;
  int64_t batch, heads;  // of a batch entry
  int64_t tiles;         // of a head
  int64_t most;          // larger costs count as this
  int64_t section_heads;

  /// key_bytes: size of the other side of a head, which should stay in L2.
  LongestFirst(const TileCosts& costs, int64_t batch, int64_t heads, int64_t tiles, int64_t most, int64_t key_bytes)
      : costs(costs), batch(batch), heads(heads), tiles(tiles), most(std::max<int64_t>(most, 1)) {
    const int64_t all = std::max<int64_t>(batch * heads, 1);
    const int64_t fitting = std::clamp<int64_t>(kBytesInL2 / std::max<int64_t>(key_bytes, 1), 1, all);
    const int64_t sections = (all + fitting - 1) / fitting;
    section_heads = (all + sections - 1) / sections;
  }

  int64_t positions() const { return batch * heads * tiles; }
  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(WorkListHead)) + positions() * static_cast<int64_t>(sizeof(ListedTile));
  }
  WorkList view(void* memory) const {
    auto* const head = static_cast<WorkListHead*>(memory);
    return {head, reinterpret_cast<ListedTile*>(head + 1), {}, Divisor(1)};
  }
};

/// Launches the kernel that writes the list. The next kernel may start early.
void list_longest_first(const LongestFirst& order, const WorkList& list, cudaStream_t stream);

}  // namespace flash_ext
