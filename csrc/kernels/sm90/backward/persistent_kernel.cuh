// The backward at head_dim 64 without options: the pipelined loop, in CTAs that stay.
//
// A CTA goes from one tile of 128 keys to the next. Q and dO of the first steps of a tile, its K and its V are loaded
// while the steps of the tile before are computed, and dQ of these is computed while dK and dV are stored. Products of
// the two warpgroups that compute start in turns.
#pragma once

#include <algorithm>

#include "kernel.cuh"
#include "persistent_producer_dq.cuh"

namespace flash_ext::sm90 {

/// Until there are no more tiles of keys.
template <class Config>
__device__ __forceinline__ void consume_tiles(const BackwardParams& p, BackwardPersistentStorage<Config>& storage,
                                              uint32_t s_tiles, float scale, int warpgroup, int lane) {
  using Consumer = BackwardPipelinedConsumer<Config>;
  BackwardCursor<Config> at;
  if (warpgroup == 1) Consumer(p, storage, s_tiles, scale, warpgroup, lane, at).pass_turn();
#pragma unroll 1
  for (;;) {
    const uint32_t slot = at.tile.stage();
    wait_for(storage.tile_full[slot], at.tile.parity());
    if (!ptx::uniform(static_cast<int>(storage.has_tile[slot]))) return;
    Consumer(p, storage, s_tiles, scale, warpgroup, ptx::reread(lane), at).run(at);
    arrive_as_warp(storage.tile_empty[slot], lane);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_persistent_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                               const __grid_constant__ BackwardWorkspace workspace,
                               const __grid_constant__ BackwardSchedule schedule, const float scale,
                               const uint32_t positions) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardPersistentStorage<Config>*>(shared + Config::kTilesBytes);
  const uint32_t s_tiles = ptx::shared_address(shared);
  ptx::launch_dependents();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) storage.init();
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    BackwardPersistentDq<Config>(p, maps, workspace, schedule, positions, storage, s_tiles, warp, lane).run();
  } else {
    ptx::acquire_registers<Config::kShape.registers>();
    consume_tiles<Config>(p, storage, s_tiles, scale, warp / kWarpgroupWarps - 1, lane);
  }
}

template <class Config>
void launch_backward_persistent(const BackwardParams& p, const BackwardArguments& a, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardPersistentStorage<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const int64_t positions = a.schedule.positions();
  const int64_t ctas = std::min<int64_t>(positions, device_attribute(cudaDevAttrMultiProcessorCount));
  const LaunchShape shape{grid_of(ctas), dim3(Config::kThreads), kSharedBytes, true};
  launch(kBackwardNames.main, backward_persistent_kernel<Config>, shape, stream, p, a.maps, a.workspace, a.schedule,
         a.scale, static_cast<uint32_t>(grid_size(positions)));
}

}  // namespace flash_ext::sm90
