#include "kernels/sm90/backward/backward.h"
#include "kernels/sm90/backward/blocks.h"
#include "kernels/sm90/backward/shape.h"
#include "kernels/sm90/common/dispatch.h"

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
  const int block_n = backward_blocks_shape().groups * kWarpgroupRows;
  return BackwardBlocksWorkspace(p, kBackwardBlockM, block_n, backward_head_dim(p.head_dim, p.head_dim_v), nullptr);
}

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_backward_types(const BackwardParams& p, Run run) {
  with_element(p, [&](auto element) {
    switch (backward_head_dim(p.head_dim, p.head_dim_v)) {
      case 64:
        return run(element, HeadDim<64>());
      case 128:
        return run(element, HeadDim<128>());
      case 192:
        return run(element, HeadDim<192>());
      default:
        return run(element, HeadDim<256>());
    }
  });
}

}  // namespace

int64_t backward_workspace_bytes(const BackwardParams& params) {
  if (lists_blocks(blocks_call(params))) return blocks_workspace(params).bytes;
  int64_t bytes = 0;
  with_backward_types(params, [&](auto element, auto head_dim) {
    bytes = backward_bytes<decltype(element), decltype(head_dim)::value>(params);
  });
  return bytes;
}

void backward(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  if (lists_blocks(blocks_call(params))) {
    return with_element(params, [&](auto element) {
      using Element = decltype(element);
      backward_head_dim(params.head_dim, params.head_dim_v) == 64
          ? run_backward_blocks<Element, 64>(params, workspace, stream)
          : run_backward_blocks<Element, 128>(params, workspace, stream);
    });
  }
  with_backward_types(params, [&](auto element, auto head_dim) {
    run_backward<decltype(element), decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
