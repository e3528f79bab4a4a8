// Launches the kernel of wide heads with options: a variant for each of kWideOptions, and one for any options together.
#pragma once

#include "kernel.cuh"
#include "kernels/common/backward/visibility.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/backward/options.cuh"

namespace flash_ext::sm90 {

/// Launches the kernel that turns masks into bits and tile states, if there are masks, and then the main kernel.
template <class Element, int kHeadDim>
void launch_backward_wide_options(const BackwardParams& p, const BackwardArguments& a, cudaStream_t stream) {
  using Plain = BackwardWideConfig<Element, kHeadDim>;
  if (a.workspace.turns) fail("sm90/backward_wide: no turns beside options");
  const VisibilityTiles& visibility = a.workspace.visibility;
  const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
  launch("sm90/backward_wide masks", mask_tiles_kernel<Plain::kBlockM, Plain::kBlockN>, tiles, stream, p, visibility);
  with_options_of<kWideOptions, true>(serving_wide_options(asked_of(p), p.seqlen_k % 2 == 0), [&](auto options) {
    using Config = BackwardWideOptionsConfig<Element, kHeadDim, options()>;
    launch_backward_wide<Config>(p, a, BackwardWideOptions(p), stream);
  });
}

}  // namespace flash_ext::sm90
