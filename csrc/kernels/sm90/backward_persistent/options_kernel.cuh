// The backward with one option at head_dim 64: the persistent kernel, with the scores of
// sm90/common/backward/option_scores.cuh. A kernel for each of kPersistentOptions.
#pragma once

#include "kernel.cuh"
#include "kernels/launch.h"
#include "kernels/sm90/common/backward/options.cuh"

namespace flash_ext::sm90 {

template <class Element, int kHeadDim>
void run_backward_persistent_options(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Plain = BackwardPersistentConfig<Element, kHeadDim>;
  if (BackwardWorkspace::takes_turns(p)) fail("sm90/backward_persistent: no turns beside options");
  with_options_of<kPersistentOptions>(serving_options(asked_of(p)), [&](auto options) {
    using Config = BackwardPersistentOptionsConfig<Element, kHeadDim, options()>;
    // backward_persistent_bytes() has computed the scratch memory for Plain.
    static_assert(sizeof(BackwardWorkTile<Config>) == sizeof(BackwardWorkTile<Plain>) &&
                  Config::kZeroesDq == Plain::kZeroesDq);
    run_backward_persistent_as<Config, BackwardPersistentDq<Config>>(
        p, memory, ScoreFactors::of_backward(p, kLog2E).scale, stream);
  });
}

}  // namespace flash_ext::sm90
