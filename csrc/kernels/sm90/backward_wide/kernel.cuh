// The kernel for head dims above 128. Warpgroups divide the products, as registers are short: one computes S and dV,
// one dP and dK, one dQ. The two CTAs of a cluster divide the keys, as shared memory is short: 64 each. They exchange
// dS, and each computes some of the columns of dQ, over all 128 keys. Options have variants (option_scores.cuh).
#pragma once

#include "config.cuh"
#include "consumer.cuh"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/backward/launch.cuh"
#include "kernels/sm90/common/shared_memory.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

constexpr BackwardKernelNames kBackwardWideNames = {"sm90/backward_wide rows", "sm90/backward_wide",
                                                    "sm90/backward_wide dq", "sm90/backward_wide sink"};

/// The same as position_of_cta(), for a cluster.
template <class Config>
__device__ __forceinline__ uint32_t position_of_cluster(const BackwardWorkspace& workspace,
                                                        BackwardWideStorage<Config>& storage) {
  if constexpr (Config::kTurns == TurnTaking::kNever) return blockIdx.x / Config::kCluster;
  auto& number = reinterpret_cast<uint32_t&>(storage.work_tile);
  if (threadIdx.x == 0 && ptx::cluster_rank() == 0) number = take_number(workspace);
  ptx::cluster_sync();
  const uint32_t taken = ptx::cluster_load(ptx::cluster_address(ptx::shared_address(&number), 0));
  ptx::cluster_sync();
  return taken;
}

/// What scores need: the options of the call, or without options the scale.
template <class Config>
using BackwardWideScoring = std::conditional_t<Config::kHasOptions, BackwardWideOptions, float>;

/// Warpgroup 0 loads and computes dQ, 1 computes dV, 2 computes dK.
template <class Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    backward_wide_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                         const __grid_constant__ BackwardWorkspace workspace,
                         const __grid_constant__ BackwardSchedule schedule,
                         const __grid_constant__ BackwardWideScoring<Config> scoring) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardWideStorage<Config>*>(shared + Config::kTilesBytes);
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(position_of_cluster<Config>(workspace, storage)));
  if (!task.exists()) return;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int rank = static_cast<int>(ptx::cluster_rank());
  // reread() keeps the compiler from computing addresses of both consumer warpgroups before the branch: with options no
  // registers are left to hold them.
  const auto rank_of_consumer = [=] { return Config::kHasOptions ? ptx::reread(rank) : rank; };
  const uint32_t s_tiles = ptx::shared_address(shared);
  // K and V are loaded while the work tile is still being computed.
  if (threadIdx.x == 0) {
    storage.init();
    load_wide_keys<Config>(p, maps, storage, s_tiles, task.sequence, task.first_key, rank);
  }
  if (threadIdx.x == kWarpgroupThreads) {
    storage.work_tile = BackwardWorkTile<Config>(p, workspace, schedule, task);
    storage.prepare(p, storage.work_tile.sequence);
  }
  ptx::cluster_sync();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    ptx::launch_dependents();  // This kernel has waited for row terms: it is launched after them.
    BackwardWideDq<Config>(p, maps, workspace, storage, s_tiles, rank, warp, lane).run();
  } else if (warp < 2 * kWarpgroupWarps) {
    ptx::acquire_registers<Config::kValueRegisters>();
    const int group = rank_of_consumer();
    find_large_lse(workspace, storage.work_tile, group, lane);
    BackwardWideValues<Config>(p, workspace, storage, s_tiles, scoring, group, lane).run();
  } else {
    ptx::acquire_registers<Config::kGradientRegisters>();
    BackwardWideGradients<Config>(p, workspace, storage, s_tiles, rank_of_consumer(), lane).run();
  }
  ptx::cluster_sync();  // the other CTA may still arrive here
}

/// Launches the main kernel. It starts when the kernel before it has ended: an early start made it slower.
template <class Config>
void launch_backward_wide(const BackwardParams& p, const BackwardArguments& a,
                          const BackwardWideScoring<Config>& scoring, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardWideStorage<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const LaunchShape keys{grid_of(Config::kCluster * a.schedule.positions()), dim3(Config::kThreads), kSharedBytes};
  launch(kBackwardWideNames.main, backward_wide_kernel<Config>, keys, stream, p, a.maps, a.workspace, a.schedule,
         scoring);
}

/// Launches the main kernel for a call with options (options_kernel.cuh). It is instantiated in files of its own.
template <class Element, int kHeadDim>
void launch_backward_wide_options(const BackwardParams& p, const BackwardArguments& arguments, cudaStream_t stream);

template <class Element, int kHeadDim>
int64_t backward_wide_bytes(const BackwardParams& p) {
  return BackwardMemory<BackwardWideConfig<Element, kHeadDim>>(p, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward_wide(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardWideConfig<Element, kHeadDim>;
  using InTurns = BackwardWideConfig<Element, kHeadDim, TurnTaking::kAlways>;
  launch_backward<Config, false>(p, memory, kBackwardWideNames, stream, [&](const BackwardArguments& arguments) {
    if (has_options(p)) return launch_backward_wide_options<Element, kHeadDim>(p, arguments, stream);
    arguments.workspace.turns ? launch_backward_wide<InTurns>(p, arguments, arguments.scale, stream)
                              : launch_backward_wide<Config>(p, arguments, arguments.scale, stream);
  });
}

}  // namespace flash_ext::sm90
