// The kernels of a call without lists, and the memory that they need: which roles serve it.
#pragma once

#include <type_traits>

#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/sm90/common/tensor_map.h"
#include "options_kernel.cuh"
#include "persistent_kernel.cuh"
#include "pipelined_options_kernel.cuh"
#include "wide_kernel.cuh"

namespace flash_ext::sm90 {

/// Whether dK and dV are too much for one warpgroup: wide_kernel.cuh.
template <class Config>
constexpr bool kIsWide = Config::kHeadDim > kMaxNarrowHeadDim;

template <class Element, int kHeadDim, TurnTaking kTurns = TurnTaking::kNever>
using BackwardConfigOf =
    std::conditional_t<(kHeadDim > kMaxNarrowHeadDim), BackwardWideConfig<Element, kHeadDim, kTurns>,
                       BackwardConfig<Element, kHeadDim, kTurns>>;

template <class Config>
BackwardWorkspace backward_workspace(const BackwardParams& p, void* memory) {
  return BackwardWorkspace(p, Config::kBlockM, Config::kBlockN, Config::kDqHeadDim, memory, Config::kPersistent);
}
/// Behind the workspace in the same memory.
template <class Config>
BackwardSchedule backward_schedule(const BackwardParams& p, const BackwardWorkspace& workspace, void* memory) {
  return BackwardSchedule(p, Config::kBlockN, Config::kHeadDim, false, static_cast<char*>(memory) + workspace.bytes);
}

/// The main kernel of a call without options that does not overlap its products.
template <class Config>
void launch_plain_backward(const BackwardParams& p, const BackwardArguments& arguments, cudaStream_t stream) {
  const int64_t positions = arguments.schedule.positions();
  if constexpr (kIsWide<Config>) {
    launch_backward_wide<Config>(p, arguments, positions, stream);
  } else {
    launch_backward_kernel<BackwardRoles<Config>>(p, arguments, positions, stream);
  }
}

/// The main kernel. kPipelined: products of a step overlap those of the next, of calls that pipelines() is true for.
template <class Config, bool kPipelined>
void launch_main_backward(const BackwardParams& p, const BackwardArguments& arguments, cudaStream_t stream) {
  using Element = typename Config::Element;
  if constexpr (kPipelined) {
    using Pipelined = BackwardPipelinedConfig<Element, Config::kHeadDim>;
    static_assert(Pipelined::kBlockN == Config::kBlockN);
    if (has_options(p)) return launch_pipelined_options<Config>(p, arguments, stream);
    return launch_backward_kernel<BackwardPipelinedRoles<Pipelined>>(p, arguments, arguments.schedule.positions(),
                                                                     stream);
  }
  if constexpr (!kIsWide<Config>) {
    if (has_options(p))
      return launch_backward_options<Config>(p, arguments.maps, arguments.workspace, arguments.schedule, stream);
  }
  if constexpr (!is_pipelined(Config::kHeadDim)) {
    using InTurns = BackwardConfigOf<Element, Config::kHeadDim, TurnTaking::kAlways>;
    if (is_persistent(Config::kHeadDim) || arguments.workspace.turns)
      return launch_plain_backward<InTurns>(p, arguments, stream);
    if constexpr (!is_persistent(Config::kHeadDim)) launch_plain_backward<Config>(p, arguments, stream);
  }
}

/// All kernels of a call: launch_main(arguments) the main one.
template <class Config, class DqLayout, bool kPermuted, class LaunchMain>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream, LaunchMain launch_main) {
  using Element = typename Config::Element;
  constexpr bool kOverlaps = !kIsWide<Config>;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, memory);
  const BackwardSchedule schedule = backward_schedule<Config>(p, workspace, memory);
  fill_work_list(p, schedule.listing, schedule.list, stream);
  using Rows = BackwardRowKernels<Element, DqLayout, Config::kBlockM, Config::kDqHeadDim, kPermuted>;
  launch_backward_sequence<Rows>(p, workspace, kBackwardNames, kOverlaps, stream, [&] {
    launch_main(BackwardArguments{backward_maps<Config>(p), workspace, schedule, base_two_scale(p)});
    combine_splits<Element, Config::kBlockM, Config::kBlockN, Config::kHeadDim>(p, schedule, kOverlaps, stream);
  });
}

template <class Config, bool kPipelined>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  launch_backward<Config, BackwardDqLayout<Config::kDqHeadDim>, kPipelined>(
      p, memory, stream, [&](const BackwardArguments& arguments) {
        launch_main_backward<Config, kPipelined>(p, arguments, stream);
      });
}

/// Whether CTAs go from one tile of keys to the next.
template <int kHeadDim>
bool stays(const BackwardParams& p) {
  return is_persistent(kHeadDim) && !has_options(p) && !takes_turns(p);
}

template <class Config>
int64_t backward_bytes(const BackwardParams& p) {
  const BackwardWorkspace workspace = backward_workspace<Config>(p, nullptr);
  return workspace.bytes + backward_schedule<Config>(p, workspace, nullptr).bytes;
}

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  if constexpr (is_persistent(kHeadDim)) {
    if (stays<kHeadDim>(p)) return backward_bytes<BackwardPersistentConfig<Element, kHeadDim>>(p);
  }
  return backward_bytes<BackwardConfigOf<Element, kHeadDim>>(p);
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardConfigOf<Element, kHeadDim>;
  if constexpr (is_persistent(kHeadDim)) {
    using Persistent = BackwardPersistentConfig<Element, kHeadDim>;
    using DqLayout = BackwardTransposedDqLayout<Persistent::kBlockM>;
    if (stays<kHeadDim>(p)) {
      return launch_backward<Persistent, DqLayout, true>(p, memory, stream, [&](const BackwardArguments& arguments) {
        launch_backward_persistent<Persistent>(p, arguments, stream);
      });
    }
  }
  if constexpr (is_pipelined(kHeadDim)) {
    if (pipelines(serving_options(asked_of(p)), p.blocks.offsets))
      return launch_backward<Config, true>(p, memory, stream);
  }
  launch_backward<Config, false>(p, memory, stream);
}

}  // namespace flash_ext::sm90
