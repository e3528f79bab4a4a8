// A call of the forward, as the launcher of each variant receives it.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/common/scheduler/key_splits.h"
#include "kernels/params.h"
#include "visibility.h"

namespace flash_ext::sm90 {

struct ForwardCall {
  ForwardParams p;
  int64_t block_n;
  KeySplits splits;
  ForwardVisibility visible;  // of a call with bias, masks or dropout
  void* workspace;
  cudaStream_t stream;
};

/// Families of variants that are compiled together: plain and with score options; with bias, masks or dropout; of block
/// masks; of caches; with max_logit.
enum class ForwardFamily { kRange, kVisible, kBlocks, kCache, kMaxLogit };

/// Launches the variant of a family that serves the call. Instantiated in the files of inst/.
template <ForwardFamily kFamily, class Element, int kHeadDim, int kHeadDimV = kHeadDim>
void run_forward(const ForwardCall& call);

}  // namespace flash_ext::sm90
