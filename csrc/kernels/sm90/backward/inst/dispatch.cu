#include "kernels/sm90/backward/backward.h"
#include "kernels/sm90/common/backward/blocks.h"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward(const BackwardParams& params, void* workspace, cudaStream_t stream);
template <class Element, int kHeadDim>
void run_backward_blocks(const BackwardParams& params, void* workspace, cudaStream_t stream);

namespace {

BackwardBlocksWorkspace blocks_workspace(const BackwardParams& p) {
  const int block_n = backward_blocks_shape().key_groups * kWarpgroupRows;
  return BackwardBlocksWorkspace(p, kBackwardBlockM, kBackwardBlockM, block_n, kMaxNarrowHeadDim, nullptr);
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams& params) {
  if (lists_blocks(blocks_call(params))) return blocks_workspace(params).bytes;
  int64_t bytes = 0;
  with_element(params, [&](auto element) { bytes = backward_bytes<decltype(element), 128>(params); });
  return bytes;
}

void backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    if (lists_blocks(blocks_call(params))) return run_backward_blocks<Element, 128>(params, workspace, stream);
    run_backward<Element, 128>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
