// The backward's options on the pipelined loop: option_scores.cuh. A kernel for each of kOptionVariants, and one more
// for those in which CTAs can take turns.
#pragma once

#include <type_traits>

#include "bias_producer.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/backward/kernel.cuh"
#include "kernels/sm90/common/backward/option_scores.cuh"
#include "mask_words.cuh"
#include "masks_producer.cuh"
#include "names.h"

namespace flash_ext::sm90 {

template <class Config>
using BackwardPipelinedOptionsDq =
    std::conditional_t<Config::kBiased, BackwardBiasDq<Config>,
                       std::conditional_t<Config::kFindsSteps, BackwardMasksDq<Config>,
                                          BackwardPipelinedDq<Config, BackwardPipelinedOptionsStorage<Config>>>>;

template <class Config>
using BackwardPipelinedOptionsRoles = BackwardRolesOf<
    Config, BackwardPipelinedOptionsStorage<Config>, BackwardPipelinedOptionsDq<Config>,
    BackwardPipelinedConsumer<Config, BackwardOptionScores<Config, BackwardPipelinedOptionsStorage<Config>>>,
    std::conditional_t<Config::kBiased, BackwardStoringBiasMaps, BackwardStoringMaps>>;

/// Launches the main kernel of calls with Config's options.
template <class Config>
void launch_pipelined_variant(const BackwardParams& p, const BackwardArguments& a, cudaStream_t stream) {
  using Roles = BackwardPipelinedOptionsRoles<Config>;
  const float scale = ScoreFactors::of_backward(p, kLog2E).scale;
  const auto launch_with = [&](const typename Roles::Maps& maps) {
    launch_backward_kernel<Roles>(kBackwardNames.main, p, {maps, a.workspace, a.schedule, scale},
                                  a.schedule.positions(), stream);
  };
  const BackwardStoringMaps maps = storing_maps(p, a.maps);
  if constexpr (Config::kBiased) {
    launch_with({maps, encode_bias_map(p, Config::kBlockM)});
  } else {
    launch_with(maps);
  }
}

template <class Config, int kOptions, TurnTaking kTurns>
using BackwardPipelinedVariant =
    BackwardPipelinedOptionsConfig<typename Config::Element, Config::kHeadDim, kOptions, kTurns>;

/// Launches the main kernel of calls with options, and before it the kernel that packs a mask of pairs.
template <class Config>
void launch_pipelined_options(const BackwardParams& p, const BackwardArguments& arguments, cudaStream_t stream) {
  const BackwardWorkspace& workspace = arguments.workspace;
  if (masks_pairs(p)) {
    const VisibilityTiles& visibility = workspace.visibility;
    const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
    launch("sm90/backward masks", mask_words_kernel<Config::kBlockM, Config::kBlockN>, tiles, stream, p, visibility);
  }
  with_options_of<kOptionVariants>(serving_options(asked_of(p)), [&](auto options) {
    if (!workspace.turns) {
      launch_pipelined_variant<BackwardPipelinedVariant<Config, options(), TurnTaking::kNever>>(p, arguments, stream);
    } else if constexpr (can_take_turns(options())) {
      launch_pipelined_variant<BackwardPipelinedVariant<Config, options(), TurnTaking::kAlways>>(p, arguments, stream);
    } else {
      fail("sm90/backward: no turns beside masks of pairs");
    }
  });
}

}  // namespace flash_ext::sm90
