// The backward with one option at head_dim 64: the persistent kernel, with the scores of
// sm90/common/backward/option_scores.cuh. A kernel for each of kPersistentOptions.
#pragma once

#include <iterator>
#include <stdexcept>

#include "kernel.cuh"
#include "kernels/sm90/common/backward/options.cuh"

namespace flash_ext::sm90 {

/// Calls run(std::integral_constant<int, options>()) for the variant that serves a call with options.
template <size_t kIndex = 0, class Run>
void with_persistent_options(int options, Run run) {
  if constexpr (kIndex == std::size(kPersistentOptions)) {
    throw std::logic_error("flash_ext: sm90/backward_persistent: no variant for these options");
  } else {
    if (options == kPersistentOptions[kIndex]) return run(std::integral_constant<int, kPersistentOptions[kIndex]>());
    with_persistent_options<kIndex + 1>(options, run);
  }
}

template <class Element, int kHeadDim>
void run_backward_persistent_options(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Plain = BackwardPersistentConfig<Element, kHeadDim>;
  if (BackwardWorkspace::takes_turns(p))
    throw std::logic_error("flash_ext: sm90/backward_persistent: no turns beside options");
  with_persistent_options(serving_options(asked_of(p)), [&](auto options) {
    using Config = BackwardPersistentOptionsConfig<Element, kHeadDim, options()>;
    // backward_persistent_bytes() has asked for that much.
    static_assert(sizeof(BackwardWorkTile<Config>) == sizeof(BackwardWorkTile<Plain>));
    const BackwardPersistentMemory<Config> all(p, memory);
    fill_work_list(p, all.schedule.listing, all.schedule.list, stream);
    const float scale = ScoreFactors::of_backward(p, kLog2E).scale;
    launch_backward_persistent<Config, BackwardPersistentDq<Config>>(p, all, Config::kBlockM, scale, stream, [&] {
      combine_splits<Element, Config::kBlockM, Config::kBlockN, kHeadDim, Config::kAnchored>(p, all.schedule, true,
                                                                                             stream);
    });
  });
}

}  // namespace flash_ext::sm90
