// The backward at head_dim 64 without options or with one of kPersistentOptions: the pipelined loop in persistent CTAs.
// Its policies:
//
//   plain                      producer.cuh
//   one option                 options_kernel.cuh
//   deterministic              turns_producer.cuh
//   the lists of a block mask  blocks_kernel.cuh
//
// A CTA goes from one tile of 128 keys to the next. While the steps of a tile are computed, K and V of the next tile
// are loaded, and Q and dO of its first steps. While dK and dV of a tile are stored, dQ of its last steps is computed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "config.cuh"
#include "consumer.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/backward/arguments.cuh"
#include "kernels/sm90/common/shared_memory.h"
#include "transposed_dq_layout.cuh"
#include "turns_producer.cuh"

namespace flash_ext::sm90 {

constexpr BackwardKernelNames kBackwardPersistentNames = {"sm90/backward_persistent rows", "sm90/backward_persistent",
                                                          "sm90/backward_persistent dq",
                                                          "sm90/backward_persistent sink"};

/// Runs a consumer warp until there are no more key tiles.
template <class Config>
__device__ __forceinline__ void consume_tiles(const BackwardParams& p, const BackwardStoringMaps& maps,
                                              BackwardPersistentStorageOf<Config>& storage, uint32_t s_tiles,
                                              float scale, int warpgroup, int lane) {
  BackwardCursor<Config> at;
#pragma unroll 1
  for (;;) {
    const uint32_t slot = at.slot();
    wait_for(storage.tile_full[slot], at.parity());
    if (ptx::uniform(storage.work_tiles[slot].heads) == kNoMoreTiles) break;
    BackwardPersistentConsumer<Config>(p, storage, s_tiles, scale, warpgroup, ptx::reread(lane), at).run(at, maps);
    arrive_as_warp(storage.tile_empty[at.slot() ^ 1], lane);
  }
  if (lane == 0) ptx::bulk_wait();
}

/// Dq: the class of a warp of the first warpgroup.
template <class Config, class Dq>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_persistent_kernel(const __grid_constant__ BackwardParams p,
                               const __grid_constant__ BackwardStoringMaps maps,
                               const __grid_constant__ BackwardWorkspace workspace,
                               const __grid_constant__ BackwardTileTable<Config> table, const float scale) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardPersistentStorageOf<Config>*>(shared + Config::kTilesBytes);
  const uint32_t s_tiles = ptx::shared_address(shared);
  ptx::launch_dependents();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) storage.init(), storage.prepare(p);
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    Dq(p, maps, workspace, table, storage, s_tiles, warp, lane).run();
  } else {
    ptx::acquire_registers<Config::kShape.registers>();
    consume_tiles<Config>(p, maps, storage, s_tiles, scale, warp / kWarpgroupWarps - 1, lane);
  }
}

/// How many CTAs fill the table, whatever the number of queries: one thread per tile, but no more CTAs than run at
/// once.
inline unsigned ctas_of_table(uint32_t tiles, int64_t num_sms) {
  const int64_t wanted = (int64_t{tiles} + kRowTermThreads - 1) / kRowTermThreads;
  return static_cast<unsigned>(std::max<int64_t>(std::min(wanted, kRowTermCtas * num_sms), 1));
}

/// Returns how many bytes of scratch memory a call needs, with or without turns.
template <class Element, int kHeadDim, TurnTaking kTurns>
int64_t backward_persistent_bytes(const BackwardParams& p) {
  return BackwardPersistentMemory<BackwardPersistentConfig<Element, kHeadDim, kTurns>>(p, nullptr).bytes;
}

/// Launches the kernels of a call. `all`: BackwardPersistentMemory, or a class with its members; `scale`: factor of
/// products; after_main() launches the kernels after the main one.
template <class Config, class Dq, class Memory, class LaunchAfter>
void launch_backward_persistent(const BackwardParams& p, const Memory& all, int query_rows, float scale,
                                cudaStream_t stream, LaunchAfter after_main) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kHeadDim;
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardPersistentStorageOf<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
  const auto launch_row_terms = [&](const LaunchShape& rows) {
    LaunchShape shape = rows;
    shape.grid.x = std::max(rows.grid.x, ctas_of_table(all.table.count, num_sms));
    launch(kBackwardPersistentNames.row_terms, backward_persistent_rows_kernel<Config>, shape, stream, p, all.workspace,
           all.schedule, all.table, rows.grid.x);
  };
  const auto launch_main = [&] {
    const auto ctas = std::min<int64_t>(all.table.count, num_sms);
    const LaunchShape shape{grid_of(ctas), dim3(Config::kThreads), kSharedBytes, true};
    launch(kBackwardPersistentNames.main, backward_persistent_kernel<Config, Dq>, shape, stream, p,
           storing_maps(p, backward_maps<Config>(p, query_rows)), all.workspace, all.table, scale);
    after_main();
  };
  using Rows = BackwardRowKernels<Element, BackwardTransposedDqLayout<kBlockM, kHeadDim>, kBlockM, kHeadDim, true>;
  launch_backward_sequence<Rows>(p, all.workspace, kBackwardPersistentNames, true, stream, launch_row_terms,
                                 launch_main);
}

/// Runs a call without lists. `scale`: factor of products.
template <class Config, class Dq>
void run_backward_persistent_as(const BackwardParams& p, void* memory, float scale, cudaStream_t stream) {
  const BackwardPersistentMemory<Config> all(p, memory);
  fill_work_list(p, all.schedule.listing, all.schedule.list, stream);
  launch_backward_persistent<Config, Dq>(p, all, Config::kBlockM, scale, stream, [&] {
    combine_splits<typename Config::Element, Config::kBlockM, Config::kBlockN, Config::kHeadDim, Config::kAnchored>(
        p, all.schedule, true, stream);
  });
}

template <class Element, int kHeadDim, TurnTaking kTurns>
void run_backward_persistent(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardPersistentConfig<Element, kHeadDim, kTurns>;
  using Dq = std::conditional_t<kTurns == TurnTaking::kAlways, BackwardPersistentTurnsDq<Config>,
                                BackwardPersistentDq<Config>>;
  run_backward_persistent_as<Config, Dq>(p, memory, score_scale(p, kLog2E), stream);
}

}  // namespace flash_ext::sm90
