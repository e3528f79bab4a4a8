// Zeroes sums of dQ while the main kernel runs. Zeroed beforehand, by the kernel of row terms, they would be written to
// memory and read again by the first additions; zeroed shortly before these additions, they are still in L2.
//
// The sums of a key head are divided into shares, one for each of its key tiles. The CTA at position i of the order
// zeroes the share that position i + distance stands for, where distance is a section and a wave. A CTA may add to the
// sums of a key head, or report them complete (dq_completion.cuh), when all shares of it have been zeroed. (A last step
// that runs past the last query adds zeros to sums after them at any time, which changes nothing.)
//
// No CTA waits for ever. It waits only for earlier positions, and publishes its own share before it waits; so the
// earliest position that is not published yet waits for nobody. It has an SM or gets one: CUDA does not promise it, but
// CTAs and clusters start in the order of their numbers, and scans of one pass over memory rely on that too. Positions
// that persistent CTAs take from a counter have an SM. The first position of a persistent CTA is its number instead,
// and it may get an SM late, if other kernels hold some. So nobody may wait for these positions: they are reserved, and
// zero nothing.
#pragma once

#include "kernels/common/sequence.cuh"
#include "kernels/ptx/bulk.h"
#include "kernels/ptx/flag.h"
#include "kernels/ptx/uniform.h"
#include "workspace.h"

namespace flash_ext {

/// A share of the sums of a key head. It has the same rows of all query heads of the group.
struct DqShare {
  int64_t first_row = 0;  // of the first query head's first plane, counted from workspace.dq in rows of a plane
  int32_t chunks = -1;    // of each plane, a float4 of every lane of a warp; 0: an empty share; below 0: no share
  int32_t key_head = 0;   // counted over all batch entries
};

/// How warps of the main kernel zero shares, kWarps of them for a position, and wait for shares. Sums of dQ have
/// kPlanes planes.
template <int kBlockM, int kHeadDim, int kPlanes, int kWarps>
class DqZeroing {
  static constexpr int kColumns = kHeadDim / kPlanes, kChunkFloats = 128;
  static constexpr int kRowsOfChunk = kColumns < kChunkFloats ? kChunkFloats / kColumns : 1;
  static constexpr int kChunksOfRow = kColumns < kChunkFloats ? 1 : kColumns / kChunkFloats;
  static_assert(kBlockM % kRowsOfChunk == 0, "tiles are made of whole chunks");

 public:
  /// The share that the CTA at `position` zeroes.
  __device__ __forceinline__ static DqShare share_of(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                     uint32_t position) {
    const DqZeroingPlan& plan = workspace.zeroing;
    DqShare share;
    const uint32_t target = plan.target(position);
    if (plan.is_past(target)) return share;
    const KeyWorkTile tile = plan.order.tile_at(target);
    share.key_head = plan.key_head(tile.batch, tile.head_kv);
    if (!plan.covers(share.key_head)) return share;
    const uint32_t tiles = (static_cast<uint32_t>(p.seqlen_q) + kBlockM - 1) / kBlockM;
    const uint32_t groups = tiles * (kBlockM / kRowsOfChunk), number = static_cast<uint32_t>(tile.tile);
    const uint32_t begin = share_begin(groups, number, plan.order.key_tiles);
    const uint32_t end = share_begin(groups, number + 1, plan.order.key_tiles);
    share.first_row = int64_t{tile.head_kv} * plan.order.group * kPlanes * workspace.tiles_per_head * kBlockM +
                      int64_t{tile.batch} * tiles * kBlockM + begin * kRowsOfChunk;
    share.chunks = static_cast<int32_t>((end - begin) * kChunksOfRow);
    return share;
  }

  /// Zeroes a share: this is the `warp`th of kWarps warps. All lanes take the same branches.
  __device__ __forceinline__ static void zero(const BackwardWorkspace& workspace, int64_t first_row, int chunks,
                                              int warp, int lane) {
    const int64_t plane = workspace.tiles_per_head * kBlockM * kColumns;
    float* g_plane = workspace.dq + first_row * kColumns + warp * kChunkFloats + lane * 4;
#pragma unroll 1
    for (int planes = workspace.zeroing.order.group * kPlanes; planes > 0; --planes, g_plane += plane) {
      float* g_chunk = g_plane;
#pragma unroll 1
      for (int left = chunks - warp; left > 0; left -= kWarps, g_chunk += kWarps * kChunkFloats)
        *reinterpret_cast<float4*>(g_chunk) = float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
  }
  /// Says that this warp has zeroed its part of a share, also of an empty one.
  __device__ __forceinline__ static void publish(const BackwardWorkspace& workspace, int key_head, int lane) {
    __syncwarp();
    if (lane == 0) ptx::add_release(workspace.zeroing.zeroed_parts + key_head, 1);
    __syncwarp();
  }
  /// Finds the share that the CTA at `position` zeroes, zeroes it and publishes it.
  __device__ __forceinline__ static void zero_share_of(const BackwardParams& p, const BackwardWorkspace& workspace,
                                                       uint32_t position, int warp, int lane) {
    const DqShare share = share_of(p, workspace, position);
    if (share.chunks < 0) return;
    zero(workspace, share.first_row, share.chunks, warp, lane);
    publish(workspace, share.key_head, lane);
  }

  /// Whether all sums of the key head of `sequence` have been zeroed. Then wait() does not wait.
  __device__ __forceinline__ static bool is_zeroed(const BackwardWorkspace& workspace, const Sequence& sequence) {
    const DqZeroingPlan& plan = workspace.zeroing;
    const int32_t key_head = plan.key_head(ptx::uniform(sequence.batch), ptx::uniform(sequence.head_kv));
    if (!plan.covers(key_head)) return true;  // the kernel of row terms has zeroed them
    const int all = static_cast<int>(plan.order.key_tiles) * kWarps;
    return !__any_sync(~0u, ptx::load_acquire(plan.zeroed_parts + key_head) < all);
  }
  /// Waits until all sums of the key head have been zeroed. Then this warp may add to them: the fence orders the stores
  /// of other SMs, which the acquiring load has seen, before its bulk reductions, which reach memory another way.
  __device__ __forceinline__ static void wait(const BackwardWorkspace& workspace, const Sequence& sequence) {
    while (!is_zeroed(workspace, sequence)) continue;
    ptx::fence_proxy_async_global();
  }

 private:
  /// Where share `number` of `shares` begins, if `groups` groups of rows are divided among them.
  __device__ __forceinline__ static uint32_t share_begin(uint32_t groups, uint32_t number, uint32_t shares) {
    return static_cast<uint32_t>(uint64_t{groups} * number / shares);
  }
};

}  // namespace flash_ext
