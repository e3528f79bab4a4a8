// The backward on wgmma with softcap, ALiBi, bias, masks and dropout: see kernel.cuh.
//
// The warpgroup that loads finds the steps of which masks leave something. It writes the metadata of each two steps
// ahead, and loads its bias and words of visibility.
#pragma once

#include <iterator>
#include <stdexcept>
#include <type_traits>

#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/tensor_map.h"
#include "options_consumer.cuh"
#include "options_producer_dq.cuh"

namespace flash_ext::sm90 {

/// Warpgroup 0 loads and makes dQ, the others compute.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_options_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                            const __grid_constant__ CUtensorMap bias_map,
                            const __grid_constant__ BackwardWorkspace workspace,
                            const __grid_constant__ BackwardOptionsLayout layout,
                            const __grid_constant__ BackwardSchedule schedule) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardOptionsStorage<Config>*>(shared + Config::kTilesBytes);
  ptx::launch_dependents();
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(blockIdx.x));
  if (!task.exists()) return ptx::wait_for_previous_grid();  // the next kernel relies on that
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    storage.init(layout);
    storage.work_tile() = BackwardWorkTile<Config>(p, workspace, schedule, task);
    storage.options() = BackwardOptions(p, storage.work_tile().sequence);
  }
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    ptx::wait_for_previous_grid();  // for row terms and cleared sums
    BackwardOptionsDq<Config>(p, maps, bias_map, workspace, layout, storage, ptx::shared_address(shared), warp, lane)
        .run();
  } else {
    ptx::acquire_registers<Config::kShape.registers>();
    find_large_lse(workspace, storage.work_tile(), warp / kWarpgroupWarps - 1, lane);
    BackwardOptionsConsumer<Config>(p, layout, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1,
                                    ptx::lane_id())
        .run(workspace.unit);
  }
}

inline bool has_options(const BackwardParams& p) {
  return p.softcap > 0 || p.alibi_slopes || hides_pairs(p) || p.dropout.rule.threshold > 0;
}

inline BackwardAsked asked_of(const BackwardParams& p) {
  const bool bias_of_keys = same_for_all_queries(p.bias);
  return {p.softcap > 0,
          p.alibi_slopes != nullptr,
          p.dropout.rule.threshold > 0,
          p.bias.data != nullptr,
          bias_of_keys,
          masks_keys(p),
          masks_pairs(p),
          p.bias.data && !bias_of_keys && can_stage_bias(p.bias) && p.bias.dtype != DType::kFloat32,
          p.bias.dtype == p.dtype,
          p.softcap > kLargestSoftcapAlone};
}

/// Calls run(std::integral_constant<int, options>()) for the variant that serves a call.
template <size_t kIndex = 0, class Run>
void with_option_variant(int options, Run run) {
  if constexpr (kIndex == std::size(kOptionVariants)) {
    run(std::integral_constant<int, kAnyOptions>());
  } else {
    if (options == kOptionVariants[kIndex]) return run(std::integral_constant<int, kOptionVariants[kIndex]>());
    with_option_variant<kIndex + 1>(options, run);
  }
}

/// The same for those that the pipelined loop serves.
template <size_t kIndex = 0, class Run>
void with_pipelined_options(int options, Run run) {
  if constexpr (kIndex < std::size(kPipelinedOptions)) {
    if (options == kPipelinedOptions[kIndex]) return run(std::integral_constant<int, kPipelinedOptions[kIndex]>());
    with_pipelined_options<kIndex + 1>(options, run);
  }
}

template <class Config>
void launch_backward_options(const BackwardParams& p, const BackwardMaps& maps, const BackwardWorkspace& workspace,
                             const BackwardSchedule& schedule, cudaStream_t stream) {
  constexpr int kMostBytes = 227 * 1024 - Config::kTilesBytes;
  constexpr int kStorageBytes = sizeof(BackwardOptionsStorage<BackwardOptionsConfig<Config, kAnyOptions>>);
  const BackwardOptionsLayout layout = BackwardOptionsLayout::of<Config>(p, kStorageBytes, kMostBytes);
  if ((layout.flags & kStepBiased) && layout.bias_slots == 0)
    throw std::logic_error("flash_ext: sm90/backward: no room for a bias");
  if (workspace.turns) throw std::logic_error("flash_ext: sm90/backward: no turns beside options");
  const CUtensorMap bias_map = layout.bias_by_panels ? encode_bias_map(p, Config::kBlockM) : CUtensorMap{};
  const VisibilityTiles& visibility = workspace.visibility;
  const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
  launch("sm90/backward masks", mask_tiles_kernel<Config::kBlockM, Config::kBlockN>, tiles, stream, p, visibility);
  const LaunchShape blocks{grid_of(schedule.positions()), dim3(Config::kThreads),
                           static_cast<size_t>(Config::kTilesBytes + layout.bytes), true};
  with_option_variant(serving_options(asked_of(p)), [&](auto options) {
    launch("sm90/backward", backward_options_kernel<BackwardOptionsConfig<Config, options()>>, blocks, stream, p, maps,
           bias_map, workspace, layout, schedule);
  });
}

}  // namespace flash_ext::sm90
