// The backward of block masks at head_dim 64: the persistent kernel, driven by lists.
//
// A kernel lists the pieces of 32 queries that see some of a tile of 128 keys, from the mask's rows
// (common/backward/query_lists.h); three of them, which follow each other in the list, are a step
// (sm90/common/backward/pieces.cuh). The 64 keys of a consumer warpgroup lie within one column of blocks. CTAs take key
// tiles longest first (common/scheduler/longest_first.h).
#pragma once

#include "blocks_config.cuh"
#include "blocks_producer.cuh"
#include "kernel.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/sm90/common/backward/blocks.h"

namespace flash_ext::sm90 {

/// Scratch memory of a call: the memory of its lists, and the table.
template <class Config>
struct BackwardPersistentBlocksMemory {
  BackwardWorkspace workspace;
  BackwardSchedule schedule;
  LongestFirst order;
  BackwardTileTable<Config> table;
  int64_t bytes;

  BackwardPersistentBlocksMemory(const BackwardParams& p, void* memory)
      : BackwardPersistentBlocksMemory(
            BackwardBlocksWorkspace(p, Config::kBlockM, kPieceQueries, Config::kBlockN, Config::kHeadDim, memory),
            memory) {}

 private:
  BackwardPersistentBlocksMemory(const BackwardBlocksWorkspace& lists, void* memory)
      : workspace(lists.rows), schedule(lists.schedule), order(lists.order), bytes(lists.bytes) {
    table = take_table<Config>(memory, bytes, order.positions());
    // CTAs take positions from the table's counter. So the list's counter, which is zeroed with the list, is free.
    table.any_large = reinterpret_cast<uint32_t*>(&schedule.list.head->taken);
  }
};

template <class Element, int kHeadDim>
int64_t backward_persistent_blocks_bytes(const BackwardParams& p) {
  return BackwardPersistentBlocksMemory<BackwardPersistentBlocksConfig<Element, kHeadDim>>(p, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward_persistent_blocks(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardPersistentBlocksConfig<Element, kHeadDim>;
  const BackwardPersistentBlocksMemory<Config> all(p, memory);
  make_query_lists(p, all.workspace.query_lists, stream);
  list_longest_first(all.order, all.schedule.list, stream);
  launch_backward_persistent<Config, BackwardPersistentBlocksDq<Config>>(with_hidden_groups(p), all, kPieceQueries,
                                                                         score_scale(p, kLog2E), stream, [] {});
}

}  // namespace flash_ext::sm90
