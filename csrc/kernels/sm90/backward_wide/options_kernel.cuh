// Launches the kernel of wide heads with options: a variant for each of kWideOptions, and one for any options together.
#pragma once

#include "kernel.cuh"

namespace flash_ext::sm90 {

/// Calls run(std::integral_constant<int, options>()) for the variant that is for these options.
template <size_t kIndex = 0, class Run>
void with_wide_options(int options, Run run) {
  if constexpr (kIndex == std::size(kWideOptions)) {
    run(std::integral_constant<int, kAnyOptions>());
  } else {
    if (options == kWideOptions[kIndex]) return run(std::integral_constant<int, kWideOptions[kIndex]>());
    with_wide_options<kIndex + 1>(options, run);
  }
}

/// Launches the main kernel behind the kernel that looks at masks.
template <class Element, int kHeadDim>
void launch_backward_wide_options(const BackwardParams& p, const BackwardArguments& a, cudaStream_t stream) {
  using Plain = BackwardWideConfig<Element, kHeadDim>;
  if (a.workspace.turns) fail("sm90/backward_wide: no turns beside options");
  const VisibilityTiles& visibility = a.workspace.visibility;
  const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
  launch("sm90/backward_wide masks", mask_tiles_kernel<Plain::kBlockM, Plain::kBlockN>, tiles, stream, p, visibility);
  with_wide_options(serving_wide_options(asked_of(p), p.seqlen_k % 2 == 0), [&](auto options) {
    using Config = BackwardWideOptionsConfig<Element, kHeadDim, options()>;
    launch_backward_wide<Config>(p, a, BackwardWideOptions(p), stream);
  });
}

}  // namespace flash_ext::sm90
