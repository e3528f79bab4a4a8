// Which calls the backward's variants of block masks serve, and their scratch memory.
#pragma once

#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/dropout/philox.h"
#include "kernels/common/lengths.h"
#include "kernels/common/scheduler/longest_first.h"
#include "shape.h"

namespace flash_ext::sm90 {

inline BackwardBlocksCall blocks_call(const BackwardParams& p) {
  const bool other_options =
      p.bias.data || p.mask.data || p.dropout.rule.threshold > 0 || p.softcap > 0 || p.alibi_slopes || p.deterministic;
  return {p.blocks.offsets ? p.blocks.block_m : 0, p.blocks.block_n,
          !other_options && p.window.left < 0 && p.window.right < 0, has_equal_lengths(p),
          backward_head_dim(p.head_dim, p.head_dim_v)};
}

/// Scratch memory of a call: row terms and dQ, the lists, and the order of key tiles by the lengths of their lists.
struct BackwardBlocksWorkspace {
  BackwardWorkspace rows;
  LongestFirst order;
  BackwardSchedule schedule;
  int64_t bytes;

  /// `listed_queries`: queries of one entry of the lists.
  BackwardBlocksWorkspace(const BackwardParams& p, int block_m, int listed_queries, int block_n, int head_dim,
                          void* memory)
      : rows(p, block_m, block_n, head_dim, memory),
        order(order_of(rows.query_lists = QueryLists(p, listed_queries, static_cast<char*>(memory) + rows.bytes), p)),
        schedule(p, block_n, head_dim, false, nullptr) {
    const int64_t lists_end = rows.bytes + rows.query_lists.bytes;
    schedule.list = order.view(static_cast<char*>(memory) + lists_end);
    bytes = lists_end + order.bytes();
    rows.has_non_finite = nullptr;  // consumers look at lse instead
  }

 private:
  static LongestFirst order_of(const QueryLists& lists, const BackwardParams& p) {
    const TileCosts costs = {lists.counts,
                             false,
                             lists.batches > 1 ? int64_t{lists.heads_kv} * lists.key_tiles : 0,
                             lists.heads_kv > 1 ? lists.key_tiles : 0,
                             1,
                             1};
    // The last argument, in bytes: Q and dO in 16 bits and dQ in float, of all queries of the group.
    return {costs, p.batch, p.heads_kv, lists.key_tiles, lists.most_steps, p.seqlen_q * p.head_dim * 8 * lists.group};
  }
};

}  // namespace flash_ext::sm90
