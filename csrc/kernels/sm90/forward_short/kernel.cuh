// Attention forward of short sequences on wgmma (FlashAttention-2, Dao 2023, algorithm 1): a CTA for each query tile,
// several on an SM. Its code is small, because at the start of a call it lies in no cache.
//
//   all warps   start the loads of Q and of the first tiles of K and V, as many as the rings hold
//   warpgroup g S, P and O of queries [64 g, + 64), one key tile after the other
//   a warp that is the last to have used a tile loads a later one into its stage
//   out leaves by TMA through the shared memory of Q
//
// The Hopper forward (../forward) mostly has one CTA on an SM, whose warps have roles. Here the other CTAs of the SM
// fill the waits.
#pragma once

#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/sm90/common/shared_memory.h"
#include "rows.cuh"

namespace flash_ext::sm90 {

/// Starts the loads of Q, unless `again`, and of the first tiles, which follow `loaded` earlier ones. The copies are
/// dealt out to the warps, because each takes some 200 cycles to start.
template <class Config>
__device__ __forceinline__ void start_loads(const ForwardShortLoads<Config>& loads, const TileSpan& tiles, int loaded,
                                            int first_query, bool again, int warp) {
  constexpr int kPanels = Config::kPanels, kOfQuery = Config::kWarpgroups * kPanels;
  constexpr int kCopies = kOfQuery + 2 * Config::kStages * kPanels;
#pragma unroll 1
  for (int first = 0; first < kCopies; first += Config::kWarps) {
    const int copy = first + warp;
    if (copy < kOfQuery) {
      if (!again) loads.load_query(copy / kPanels, copy % kPanels, first_query);
      continue;
    }
    const int rank = (copy - kOfQuery) / (2 * kPanels), of_tile = (copy - kOfQuery) % (2 * kPanels);
    const int stage = (loaded + rank) % Config::kStages, tile = tiles.begin + rank;
    if (copy >= kCopies || tile >= tiles.end) continue;
    if (of_tile < kPanels) {
      loads.load_keys(stage, of_tile, tile);
    } else {
      loads.load_values(stage, of_tile - kPanels, tile);
    }
  }
}

/// Announces the loads of start_loads(). Called by one thread.
template <class Config>
__device__ __forceinline__ void announce_loads(ForwardShortStorage<Config>& storage, const TileSpan& tiles,
                                               int loaded) {
#pragma unroll 1
  for (int rank = 0; rank < min(Config::kStages, tiles.end - tiles.begin); ++rank) {
    const int stage = (loaded + rank) % Config::kStages;
    ptx::mbarrier_arrive_expect(address(storage.k_full[stage]), Config::kKeyBytes);
    ptx::mbarrier_arrive_expect(address(storage.v_full[stage]), Config::kKeyBytes);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_short_kernel(const __grid_constant__ ForwardShortCall call, const __grid_constant__ ForwardMaps maps,
                         const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<ForwardShortStorage<Config>*>(shared + Config::kTilesBytes);
  const uint32_t s_tiles = ptx::shared_address(shared);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), lane = static_cast<int>(threadIdx.x % 32);
  const Sequence sequence(call.sequences, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.x));
  const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * Config::kBlockM;  // most keys first, if causal
  const TileSpan tiles =
      sequence.template key_tiles<Config::kBlockN>(first_query, min(first_query + Config::kBlockM, sequence.seqlen_q));
  const ForwardShortLoads<Config> loads(maps, storage, s_tiles, sequence.batch, sequence.head, sequence.head_kv);
  if (threadIdx.x == 0) {
    storage.init();
    ptx::mbarrier_arrive_expect(address(storage.q_full), Config::kWarpgroups * Config::kQueryBytes);
  }
  if (threadIdx.x == 32) maps.prefetch();
  ptx::wait_for_previous_grid();  // up to here this grid may overlap the previous one
  ptx::launch_dependents();       // after the wait: the next kernel then overlaps this one, and none before it

  ForwardShortRows<Config> rows(call, storage, loads, sequence, s_tiles, first_query, warp / kWarpgroupWarps,
                                warp % kWarpgroupWarps, lane);
  const int num_tiles = tiles.end - tiles.begin;
  const bool has_partial = tiles.full_end - tiles.full_begin < num_tiles;
  bool sanitises = false;
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) announce_loads(storage, tiles, sanitises ? num_tiles : 0);
    __syncthreads();  // barriers are initialised; in a second pass, all have used the tiles of the first
    if (lane == 0) start_loads(loads, tiles, sanitises ? num_tiles : 0, first_query, sanitises, warp);
    __syncwarp();
    rows.visit(tiles, sanitises ? num_tiles : 0, sanitises);
    if (sanitises || !has_partial || !__syncthreads_or(rows.met_non_finite())) break;
    sanitises = true;
  }
  rows.store(maps.out);
  if (sanitises) rows.add_removed(p, tiles);
}

template <class Config>
void launch_forward_short(const ForwardParams& p, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardShortStorage<Config>);
  static_assert(Config::kCtasPerSm * (kSharedBytes + kReservedSharedBytes) <= kSharedBytesOfSm);
  LaunchShape shape = {grid_of(p.heads_q, (p.seqlen_q + Config::kBlockM - 1) / Config::kBlockM, p.batch),
                       dim3(Config::kThreads), kSharedBytes};
  shape.overlaps_previous = true;
  launch("sm90/forward_short", forward_short_kernel<Config>, shape, stream, ForwardShortCall(p),
         encode_forward_maps(p, Config::kBlockN), p);
}

/// Launches the shape whose tiles have block_n keys, with CTAs of params.block_m queries.
template <class Element, int kHeadDim>
void run_forward_short(const ForwardParams& params, int64_t block_n, cudaStream_t stream) {
  const auto launch_if_planned = [&](auto config) {
    using Config = decltype(config);
    const bool is_planned = params.block_m == Config::kBlockM && block_n == Config::kBlockN;
    if (is_planned) launch_forward_short<Config>(params, stream);
    return is_planned;
  };
  if (launch_if_planned(ForwardShortConfig<Element, kHeadDim, 0>())) return;
  if (launch_if_planned(ForwardShortConfig<Element, kHeadDim, 1>())) return;
  if constexpr (kHeadDim > 64) {
    if (launch_if_planned(ForwardShortConfig<Element, kHeadDim, 2>())) return;
  }
  fail("sm90/forward_short has no tiles of the shape that was planned");
}

}  // namespace flash_ext::sm90
