#include "kernels/common/backward/workspace.h"
#include "kernels/sm90/backward_short/backward_short.h"
#include "kernels/sm90/backward_short/shape.h"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim, int kWarpgroups>
void run_backward_short(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_short_workspace_bytes(const BackwardParams& params) {
  BackwardParams without_sums = params;
  without_sums.dq.data = nullptr;
  return BackwardWorkspace(without_sums, kWarpgroupRows, kWarpgroupRows, kBackwardShortHeadDim, nullptr).bytes;
}

void backward_short(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  const int warpgroups = backward_short_warpgroups(params.seqlen_q, params.seqlen_k);
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    if (backward_short_head_dim(params.head_dim) == kBackwardShortHeadDim) {
      return warpgroups == 1 ? run_backward_short<Element, 128, 1>(params, workspace, stream)
                             : run_backward_short<Element, 128, 2>(params, workspace, stream);
    }
    switch (warpgroups) {
      case 1:
        return run_backward_short<Element, 64, 1>(params, workspace, stream);
      case 2:
        return run_backward_short<Element, 64, 2>(params, workspace, stream);
      case 3:
        return run_backward_short<Element, 64, 3>(params, workspace, stream);
      default:
        return run_backward_short<Element, 64, 4>(params, workspace, stream);
    }
  });
}

}  // namespace flash_ext::sm90
