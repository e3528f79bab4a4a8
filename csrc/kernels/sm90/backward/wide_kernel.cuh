// The kernel for head dims above 128. Warpgroups divide the products, as registers are short: one computes S and dV,
// one dP and dK, one dQ. The two CTAs of a cluster divide the keys, as shared memory is short: 64 each. They exchange
// dS, and each computes some of the columns of dQ, over all 128 keys.
#pragma once

#include "kernel.cuh"
#include "wide_consumer.cuh"
#include "wide_producer_dq.cuh"

namespace flash_ext::sm90 {

/// The same as position_of_cta(), for a cluster.
template <class Config>
__device__ __forceinline__ uint32_t position_of_cluster(const BackwardWorkspace& workspace,
                                                        BackwardWideStorage<Config>& storage) {
  if constexpr (Config::kTurns == TurnTaking::kNever) return blockIdx.x / Config::kCluster;
  auto& number = reinterpret_cast<uint32_t&>(storage.work_tile);
  if (threadIdx.x == 0 && ptx::cluster_rank() == 0) number = take_number(workspace);
  ptx::cluster_sync();
  const uint32_t drawn = ptx::cluster_load(ptx::cluster_address(ptx::shared_address(&number), 0));
  ptx::cluster_sync();
  return drawn;
}

/// Warpgroup 0 loads and makes dQ, 1 makes dV, 2 makes dK.
template <class Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    backward_wide_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ BackwardWorkspace workspace,
                         const __grid_constant__ BackwardSchedule schedule, float scale) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardWideStorage<Config>*>(shared + Config::kTilesBytes);
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(position_of_cluster<Config>(workspace, storage)));
  if (!task.exists()) return;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(ptx::cluster_rank());
  const uint32_t s_tiles = ptx::shared_address(shared);
  // K and V are loaded while the rest is still being computed.
  if (threadIdx.x == 0) {
    storage.init();
    load_wide_keys<Config>(p, maps, storage, s_tiles, task.sequence, task.first_key, rank);
  }
  if (threadIdx.x == kWarpgroupThreads) storage.work_tile = BackwardWorkTile<Config>(p, workspace, schedule, task);
  ptx::cluster_sync();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    BackwardWideDq<Config>(p, maps, workspace, storage, s_tiles, rank, warp, lane).run();
  } else if (warp < 2 * kWarpgroupWarps) {
    ptx::acquire_registers<Config::kShape.registers>();
    find_large_lse(workspace, storage.work_tile, rank, lane);
    BackwardWideValues<Config>(p, storage, s_tiles, scale, rank, lane).run();
  } else {
    ptx::acquire_registers<Config::kGradientRegisters>();
    BackwardWideGradients<Config>(p, storage, s_tiles, scale, rank, lane).run();
  }
  ptx::cluster_sync();  // the other CTA may still arrive here
}

/// As launch_backward_kernel(). It starts after the kernel before it: an early start made it slower.
template <class Config>
void launch_backward_wide(const BackwardParams& p, const BackwardArguments& a, int64_t positions, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardWideStorage<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const LaunchShape keys{grid_of(Config::kCluster * positions), dim3(Config::kThreads), kSharedBytes};
  launch(kBackwardNames.main, backward_wide_kernel<Config>, keys, stream, p, a.maps, a.workspace, a.schedule, a.scale);
}

}  // namespace flash_ext::sm90
