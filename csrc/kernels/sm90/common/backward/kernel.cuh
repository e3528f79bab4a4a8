// The main kernel of the backward on wgmma (FlashAttention-2, Dao 2023, algorithm 2), recomputing the probabilities
// from lse:
//
//   S^T = K Q^T,   P^T = 2^(S^T - lse),   dP^T = V dO^T,   dS^T = P^T (dP^T - D)    D: common/backward/row_terms.cuh
//   dV += P^T dO,  dK += dS^T Q,          dQ += dS K
//
// A CTA owns a tile of keys and loops over the query tiles that see them. Warpgroup 0 loads tiles and computes dQ. The
// others, the consumers, have 64 keys each and compute the rest. How their products overlap is a policy of this kernel,
// its roles: sm90/backward and sm90/backward_options have them. sm90/backward_persistent and sm90/backward_wide have
// kernels of their own.
#pragma once

#include "arguments.cuh"
#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/shared_memory.h"
#include "scheduler.cuh"

namespace flash_ext::sm90 {

/// The policies of a kernel: shared memory, the two kinds of warps, and the types of the kernel's last two arguments.
template <class Config_, class Storage_, class Dq_, class Consumer_, class Maps_ = BackwardStoringMaps>
struct BackwardRolesOf {
  using Config = Config_;
  using Storage = Storage_;
  using Dq = Dq_;
  using Consumer = Consumer_;
  using Maps = Maps_;
  using Arguments = BackwardArgumentsOf<Maps>;
  // The kernel's last two arguments: (schedule, scale) here, (layout, schedule) in sm90/backward_options.
  using Fourth = BackwardSchedule;
  using Fifth = float;
  static constexpr bool kHasLayout = false;  // whether the fourth argument is a BackwardOptionsLayout

  /// Called by one thread.
  __device__ __forceinline__ static void init(const Arguments&, Storage& storage) { storage.init(); }
};

template <class Roles, class Config = typename Roles::Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ typename Roles::Maps maps,
                    const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ typename Roles::Fourth fourth,
                    const __grid_constant__ typename Roles::Fifth fifth) {
  const typename Roles::Arguments arguments{maps, workspace, fourth, fifth};
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<typename Roles::Storage*>(shared + Config::kTilesBytes);
  const BackwardSchedule& schedule = arguments.schedule;
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(position_of_cta<Config>(workspace, storage)));
  // The next kernel relies on the wait. Where CTAs zero sums of dQ for others, or count, every position has a tile.
  if (!task.exists()) return ptx::wait_for_previous_grid();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    Roles::init(arguments, storage);
    storage.work_tile = BackwardWorkTile<Config>(p, workspace, schedule, task);
    if constexpr (Roles::kHasLayout) {
      storage.options = typename Roles::Options(p, storage.work_tile.sequence);
    } else {
      storage.prepare(p);
    }
  }
  __syncthreads();
  storage.read_masks(p, workspace);
  // Written out, not in functions of Roles: with one more level of inlined calls ptxas orders the instructions
  // otherwise.
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    ptx::wait_for_previous_grid();  // for row terms, and for sums and counters zeroed with them
    ptx::launch_dependents();       // not before: the next kernel uses these counters
    if constexpr (Roles::kHasLayout) {
      typename Roles::Dq(p, arguments.maps, arguments.maps.bias, workspace, arguments.layout, storage,
                         ptx::shared_address(shared), warp, lane)
          .run();
    } else {
      typename Roles::Dq(p, arguments.maps, workspace, storage, ptx::shared_address(shared), warp, lane).run();
    }
  } else {
    ptx::acquire_registers<Config::kShape.registers>();
    find_large_lse(workspace, storage.work_tile, warp / kWarpgroupWarps - 1, lane);
    if constexpr (Roles::kHasLayout) {
      typename Roles::Consumer(p, arguments.layout, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1,
                               ptx::lane_id())
          .run(workspace.keep_scale);
    } else {
      typename Roles::Consumer(p, storage, ptx::shared_address(shared), arguments.scale, warp / kWarpgroupWarps - 1,
                               lane)
          .run(arguments.maps);
    }
  }
}

/// Launches the main kernel with `positions` CTAs, in the order of tiles. The kernel itself waits for the one before
/// it.
template <class Roles>
void launch_backward_kernel(const char* name, const BackwardParams& p, const typename Roles::Maps& maps,
                            const BackwardWorkspace& workspace, const typename Roles::Fourth& fourth,
                            const typename Roles::Fifth& fifth, int64_t positions, size_t shared_bytes,
                            cudaStream_t stream) {
  using Config = typename Roles::Config;
  static_assert(Config::kTilesBytes + sizeof(typename Roles::Storage) <= kMaxSharedBytes);
  const LaunchShape keys{grid_of(positions), dim3(Config::kThreads), Config::kTilesBytes + shared_bytes, true};
  launch(name, backward_kernel<Roles>, keys, stream, p, maps, workspace, fourth, fifth);
}

/// Launches roles whose shared memory is their storage alone.
template <class Roles>
void launch_backward_kernel(const char* name, const BackwardParams& p,
                            const BackwardArgumentsOf<typename Roles::Maps>& a, int64_t positions,
                            cudaStream_t stream) {
  launch_backward_kernel<Roles>(name, p, a.maps, a.workspace, a.schedule, a.scale, positions,
                                sizeof(typename Roles::Storage), stream);
}

}  // namespace flash_ext::sm90
