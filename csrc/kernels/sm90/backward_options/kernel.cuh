// The backward with any options, softcap, ALiBi, bias, masks and dropout, in a loop without overlap: a product begins
// when the one before has ended (sm90/common/backward/kernel.cuh has the equations and the kernel). Its policies are in
// consumer.cuh, with key_gradients.cuh, and in producer.cuh. The warpgroup that loads finds the steps that masks leave
// (scheduler.cuh). It writes the metadata of each step two steps ahead, and loads the step's bias and mask words.
#pragma once

#include <iterator>
#include <type_traits>

#include "config.cuh"
#include "consumer.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/backward/kernel.cuh"
#include "kernels/sm90/common/backward/launch.cuh"
#include "kernels/sm90/common/shared_memory.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

constexpr BackwardKernelNames kBackwardOptionsNames = {"sm90/backward_options rows", "sm90/backward_options",
                                                       "sm90/backward_options dq", "sm90/backward_options sink"};

struct BackwardOptionsArguments {
  const BackwardBiasMaps& maps;
  const BackwardWorkspace& workspace;
  const BackwardOptionsLayout& layout;
  const BackwardSchedule& schedule;
};

/// The policies of this kernel, as in BackwardRolesOf.
template <class Config_>
struct BackwardOptionsRoles {
  using Config = Config_;
  using Storage = BackwardOptionsStorage<Config>;
  using Dq = BackwardOptionsDq<Config>;
  using Consumer = BackwardOptionsConsumer<Config>;
  using Options = BackwardOptions;
  using Arguments = BackwardOptionsArguments;
  using Maps = BackwardBiasMaps;
  using Fourth = BackwardOptionsLayout;
  using Fifth = BackwardSchedule;
  static constexpr bool kHasLayout = true;

  /// Called by one thread.
  __device__ __forceinline__ static void init(const Arguments& a, Storage& storage) { storage.init(a.layout); }
};

/// Calls run(std::integral_constant<int, options>()) for the variant that serves a call: none that another kernel of
/// this head_dim serves.
template <int kHeadDim, size_t kIndex = 0, class Run>
void with_option_variant(int options, Run run) {
  if constexpr (kIndex == std::size(kOptionVariants)) {
    run(std::integral_constant<int, kAnyOptions>());
  } else {
    constexpr int kOwn = kOptionVariants[kIndex];
    if constexpr (is_pipelined(kHeadDim) ? serves_beside_pipelined(kOwn) : !persists(kOwn)) {
      if (options == kOwn) return run(std::integral_constant<int, kOwn>());
    }
    with_option_variant<kHeadDim, kIndex + 1>(options, run);
  }
}

template <class Config>
void launch_backward_options(const BackwardParams& p, const BackwardArguments& arguments, cudaStream_t stream) {
  const BackwardWorkspace& workspace = arguments.workspace;
  const BackwardSchedule& schedule = arguments.schedule;
  constexpr int kMostBytes = kMaxSharedBytes - Config::kTilesBytes;
  constexpr int kStorageBytes = sizeof(BackwardOptionsStorage<BackwardOptionsConfig<Config, kAnyOptions>>);
  const BackwardOptionsLayout layout = BackwardOptionsLayout::of<Config>(p, kStorageBytes, kMostBytes);
  if ((layout.flags & kStepBiased) && layout.bias_slots == 0) fail("sm90/backward_options: no room for a bias");
  if (workspace.turns) fail("sm90/backward_options: no turns beside options");
  const VisibilityTiles& visibility = workspace.visibility;
  const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
  launch("sm90/backward_options masks", mask_tiles_kernel<Config::kBlockM, Config::kBlockN>, tiles, stream, p,
         visibility);
  const BackwardBiasMaps maps = {arguments.maps,
                                 layout.bias_by_panels ? encode_bias_map(p, Config::kBlockM) : CUtensorMap{}};
  with_option_variant<Config::kHeadDim>(serving_options(asked_of(p)), [&](auto options) {
    using Roles = BackwardOptionsRoles<BackwardOptionsConfig<Config, options()>>;
    launch_backward_kernel<Roles>(kBackwardOptionsNames.main, p, maps, workspace, layout, schedule,
                                  schedule.positions(), static_cast<size_t>(layout.bytes), stream);
  });
}

template <class Element, int kHeadDim>
int64_t backward_options_bytes(const BackwardParams& p) {
  return BackwardMemory<BackwardUnpipelinedConfig<Element, kHeadDim>>(p, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward_options(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardUnpipelinedConfig<Element, kHeadDim>;
  launch_backward<Config, false>(p, memory, kBackwardOptionsNames, stream,
                                 [&](const BackwardArguments& a) { launch_backward_options<Config>(p, a, stream); });
}

}  // namespace flash_ext::sm90
