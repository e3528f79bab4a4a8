// The backward on wgmma with softcap, ALiBi, bias, masks and dropout: see kernel.cuh.
//
// The warpgroup that loads finds the steps of which masks leave something. It writes the metadata of each two steps
// ahead, and loads its bias and words of visibility.
#pragma once

#include <iterator>
#include <stdexcept>
#include <type_traits>

#include "kernel.cuh"
#include "kernels/ptx/lane.h"
#include "options_consumer.cuh"
#include "options_producer_dq.cuh"

namespace flash_ext::sm90 {

struct BackwardOptionsArguments {
  const BackwardBiasMaps& maps;
  const BackwardWorkspace& workspace;
  const BackwardOptionsLayout& layout;
  const BackwardSchedule& schedule;
};

/// As BackwardRolesOf.
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

/// Calls run(std::integral_constant<int, options>()) for the variant that serves a call. kBesidePipelined: which has no
/// call that the pipelined loop serves.
template <bool kBesidePipelined, size_t kIndex = 0, class Run>
void with_option_variant(int options, Run run) {
  if constexpr (kIndex == std::size(kOptionVariants)) {
    run(std::integral_constant<int, kAnyOptions>());
  } else {
    constexpr int kOwn = kOptionVariants[kIndex];
    if constexpr (!kBesidePipelined || serves_beside_pipelined(kOwn)) {
      if (options == kOwn) return run(std::integral_constant<int, kOwn>());
    }
    with_option_variant<kBesidePipelined, kIndex + 1>(options, run);
  }
}

/// The same for those that the pipelined loop serves.
template <size_t kIndex = 0, class Run>
void with_pipelined_options(int options, Run run) {
  if constexpr (kIndex < std::size(kOptionVariants)) {
    if (options == kOptionVariants[kIndex]) return run(std::integral_constant<int, kOptionVariants[kIndex]>());
    with_pipelined_options<kIndex + 1>(options, run);
  }
}

template <class Config>
void launch_backward_options(const BackwardParams& p, const BackwardMaps& maps, const BackwardWorkspace& workspace,
                             const BackwardSchedule& schedule, cudaStream_t stream) {
  constexpr int kMostBytes = kMaxSharedBytes - Config::kTilesBytes;
  constexpr int kStorageBytes = sizeof(BackwardOptionsStorage<BackwardOptionsConfig<Config, kAnyOptions>>);
  const BackwardOptionsLayout layout = BackwardOptionsLayout::of<Config>(p, kStorageBytes, kMostBytes);
  if ((layout.flags & kStepBiased) && layout.bias_slots == 0)
    throw std::logic_error("flash_ext: sm90/backward: no room for a bias");
  if (workspace.turns) throw std::logic_error("flash_ext: sm90/backward: no turns beside options");
  const VisibilityTiles& visibility = workspace.visibility;
  const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
  launch("sm90/backward masks", mask_tiles_kernel<Config::kBlockM, Config::kBlockN>, tiles, stream, p, visibility);
  const BackwardBiasMaps all_maps = {maps, layout.bias_by_panels ? encode_bias_map(p, Config::kBlockM) : CUtensorMap{}};
  with_option_variant<is_pipelined(Config::kHeadDim)>(serving_options(asked_of(p)), [&](auto options) {
    using Roles = BackwardOptionsRoles<BackwardOptionsConfig<Config, options()>>;
    launch_backward_kernel<Roles>(p, all_maps, workspace, layout, schedule, schedule.positions(),
                                  static_cast<size_t>(layout.bytes), stream);
  });
}

}  // namespace flash_ext::sm90
