// The work list of packed sequences: the tiles that exist, found on the device from cu_seqlens and seqused, so that no
// grid and no loop depends on a bound on the lengths. The order is that of work_order.h.
//
// A kernel that has a work tile per (sequence, tile of `block` rows, head) uses it like this:
//
//   host    const WorkListPlan plan(p, WorkListSide::kKeys, work_order(...));
//           workspace bytes += plan.bytes();                          // 0: a plain grid serves, no list
//           WorkList list = plan.view(memory);                        // memory at a multiple of 128 bytes
//           fill_work_list(p, plan, list, stream);                    // launches the kernel that writes it
//           grid = plan.max_work_tiles() CTAs, or fewer persistent ones
//   device  // Call wait_for_previous_grid() first, unless something else has waited for the kernel that lists.
//           const TileIndex tile = list.locate(position);              // one load of 16 bytes
//           if (tile.tile == kNoTile) return;                         // the host knows only a bound on the number
//
// list.head->taken is a counter for persistent CTAs, which the same kernel zeroes. The kernel that fills the list lets
// the next one start early (ptx::launch_dependents()). Without a list (plan.listed is false) the launcher itself maps
// positions to work tiles.
//
// cu_seqlens that are no cumulative lengths may give too many tiles; those without room are left out. Every listed tile
// lies within its sequence, as Sequence clamps it.
#pragma once

#include <cuda_runtime_api.h>

#include "heads_in_l2.h"
#include "kernels/common/divisor.h"
#include "kernels/params.h"
#include "work_order.h"

namespace flash_ext {

enum class WorkListSide { kQueries, kKeys };  // whose tiles are listed

/// The head of a list. It lies before the entries in memory.
struct alignas(128) WorkListHead {
  unsigned long long taken;  // positions taken by persistent CTAs, besides the first of each
};

/// The list as a kernel sees it.
struct WorkList {
  WorkListHead* head = nullptr;  // null: no list
  ListedTile* entries = nullptr;
  WorkOrder order;
  Divisor bundle_heads = Divisor(1);

  __device__ __forceinline__ explicit operator bool() const { return head != nullptr; }
  /// Finds the work tile at a position below WorkListPlan::max_work_tiles().
  __device__ __forceinline__ TileIndex locate(int position) const {
    const int at = static_cast<int>(bundle_heads.quotient(static_cast<uint32_t>(position)));
    const int4 entry = *reinterpret_cast<const int4*>(entries + at);
    return {entry.x, entry.z + position - at * static_cast<int>(bundle_heads.value), entry.y};
  }
};

/// The list of a call as the host sees it.
struct WorkListPlan {
  WorkListSide side;
  WorkOrder order;
  int64_t most_tiles;  // upper bound on the tiles that exist, with or without a list
  bool listed;

  WorkListPlan(const AttentionParams& p, WorkListSide side, const WorkOrder& order) : side(side), order(order) {
    const bool keys = side == WorkListSide::kKeys;
    const bool packed = (keys ? p.seq.cu_seqlens_k : p.seq.cu_seqlens_q) != nullptr;
    const int64_t longest = keys ? p.seqlen_k : p.seqlen_q, rows = keys ? p.total_k : p.total_q;
    const int64_t rows_in_memory = packed ? rows : p.batch * longest;
    most_tiles = flash_ext::most_tiles(p.batch, longest, rows_in_memory, order.block);
    listed = packed && lists_tiles(p.batch, longest, rows_in_memory, order.block, order.heads);
  }

  int64_t most_entries() const { return most_tiles * order.bundles; }
  int64_t max_work_tiles() const { return most_tiles * order.heads; }
  int64_t bytes() const {
    return listed ? static_cast<int64_t>(sizeof(WorkListHead) + most_entries() * sizeof(ListedTile)) : 0;
  }
  WorkList view(void* memory) const {
    if (!listed) return {};
    auto* const head = static_cast<WorkListHead*>(memory);
    return {head, reinterpret_cast<ListedTile*>(head + 1), order, Divisor(order.bundle_heads)};
  }
};

/// The list of a forward: query tiles. Under a causal mask, the tiles with the most keys come first. K and V of a
/// section fit into L2.
inline WorkListPlan forward_work_list(const AttentionParams& p, int64_t block_m) {
  const int64_t row_bytes = (p.head_dim + p.head_dim_v) * (p.dtype == DType::kFloat32 ? 4 : 2);
  const int64_t head_group = p.heads_q / p.heads_kv;
  return {p, WorkListSide::kQueries, work_order(block_m, p.heads_q, head_group, true, kBytesInL2 / row_bytes, 1)};
}

/// The list of a backward: key tiles of key heads. Q, dO and the float sums of dQ of a section fit into L2. A section
/// of several sequences takes a quarter of that, so that the tiles of a head, which add to the same dQ, run in one
/// wave. The first key tile comes first, because it has the most queries under a causal mask; or the last one, if
/// additions to dQ take turns in that order.
inline WorkListPlan backward_work_list(const AttentionParams& p, int64_t block_n, bool last_tile_first) {
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = (p.head_dim + p.head_dim_v) * element_bytes + p.head_dim * 4;
  const int64_t rows_in_l2 = kBytesInL2 / (row_bytes * (p.heads_q / p.heads_kv));
  return {p, WorkListSide::kKeys, work_order(block_n, p.heads_kv, 1, last_tile_first, rows_in_l2, 4)};
}

/// Launches the kernel that writes the list, if the plan has one.
void fill_work_list(const AttentionParams& p, const WorkListPlan& plan, const WorkList& list, cudaStream_t stream);

}  // namespace flash_ext
