#include "kernels/common/backward/turns.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/sm90/backward_persistent/backward_persistent.h"
#include "kernels/sm90/common/backward/blocks.h"
#include "kernels/sm90/common/backward/options.cuh"
#include "kernels/sm90/common/element.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <class Element, int kHeadDim, TurnTaking kTurns>
int64_t backward_persistent_bytes(const BackwardParams& params);
template <class Element, int kHeadDim, TurnTaking kTurns>
void run_backward_persistent(const BackwardParams& params, void* workspace, cudaStream_t stream);
template <class Element, int kHeadDim>
void run_backward_persistent_options(const BackwardParams& params, void* workspace, cudaStream_t stream);
template <class Element, int kHeadDim>
int64_t backward_persistent_blocks_bytes(const BackwardParams& params);
template <class Element, int kHeadDim>
void run_backward_persistent_blocks(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_persistent_workspace_bytes(const BackwardParams& params) {
  int64_t bytes = 0;
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    bytes = lists_blocks(blocks_call(params)) ? backward_persistent_blocks_bytes<Element, 64>(params)
            : BackwardWorkspace::takes_turns(params)
                ? backward_persistent_bytes<Element, 64, TurnTaking::kAlways>(params)
                : backward_persistent_bytes<Element, 64, TurnTaking::kNever>(params);
  });
  return bytes;
}

void backward_persistent(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_element(params, [&](auto element) {
    using Element = decltype(element);
    if (lists_blocks(blocks_call(params)))
      return run_backward_persistent_blocks<Element, 64>(params, workspace, stream);
    if (has_options(params)) return run_backward_persistent_options<Element, 64>(params, workspace, stream);
    if (BackwardWorkspace::takes_turns(params))
      return run_backward_persistent<Element, 64, TurnTaking::kAlways>(params, workspace, stream);
    run_backward_persistent<Element, 64, TurnTaking::kNever>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
