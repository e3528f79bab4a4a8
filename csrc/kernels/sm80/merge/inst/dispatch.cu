#include "kernels/sm80/common/element.h"
#include "kernels/sm80/merge/kernel.cuh"
#include "kernels/sm80/merge/merge.h"

namespace flash_ext::sm80 {

void merge(const MergeParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_merge<decltype(element)>(params, stream); });
}

void merge_backward(const MergeBackwardParams& params, cudaStream_t stream) {
  with_element(params.dtype, [&](auto element) { run_merge_backward<decltype(element)>(params, stream); });
}

}  // namespace flash_ext::sm80
