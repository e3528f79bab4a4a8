// Chooses the kernels of a call without lists, and lays out the memory that they need.
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
  return BackwardWorkspace(p, Config::kBlockM, Config::kBlockN, Config::kDqHeadDim, memory);
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

/// The main kernel. kPipelined: products of a step overlap those of the next, for calls of which pipelines() is true.
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

template <class Config, bool kPipelined>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Element = typename Config::Element;
  constexpr bool kOverlaps = !kIsWide<Config>;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, memory);
  const BackwardSchedule schedule = backward_schedule<Config>(p, workspace, memory);
  fill_work_list(p, schedule.listing, schedule.list, stream);
  using Rows = BackwardRowKernels<Element, BackwardDqLayout<Config::kDqHeadDim>, Config::kBlockM, Config::kDqHeadDim,
                                  kPipelined>;
  launch_backward_sequence<Rows>(p, workspace, kBackwardNames, kOverlaps, stream, [&] {
    launch_main_backward<Config, kPipelined>(p, {backward_maps<Config>(p), workspace, schedule, base_two_scale(p)},
                                             stream);
    combine_splits<Element, Config::kBlockM, Config::kBlockN, Config::kHeadDim>(p, schedule, kOverlaps, stream);
  });
}

/// Whether the persistent kernel serves the call.
template <int kHeadDim>
bool serves_persistently(const BackwardParams& p) {
  return is_persistent(kHeadDim) && !has_options(p) && !p.deterministic;
}

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  if constexpr (is_persistent(kHeadDim)) {
    if (serves_persistently<kHeadDim>(p))
      return BackwardPersistentMemory<BackwardPersistentConfig<Element, kHeadDim>>(p, nullptr).bytes;
  }
  using Config = BackwardConfigOf<Element, kHeadDim>;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, nullptr);
  return workspace.bytes + backward_schedule<Config>(p, workspace, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardConfigOf<Element, kHeadDim>;
  if constexpr (is_persistent(kHeadDim)) {
    if (serves_persistently<kHeadDim>(p))
      return run_backward_persistent<BackwardPersistentConfig<Element, kHeadDim>>(p, memory, stream);
  }
  if constexpr (is_pipelined(kHeadDim)) {
    if (pipelines(serving_options(asked_of(p)), p.blocks.offsets))
      return launch_backward<Config, true>(p, memory, stream);
  }
  launch_backward<Config, false>(p, memory, stream);
}

}  // namespace flash_ext::sm90
