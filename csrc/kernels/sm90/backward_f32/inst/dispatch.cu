#include "kernels/sm90/backward_f32/backward_f32.h"
#include "kernels/sm90/backward_f32/config.cuh"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <int kHeadDim>
void run_backward_f32(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_f32_workspace_bytes(const BackwardParams& params) {
  const BackwardF32Workspace workspace(params, nullptr);
  return workspace.bytes + backward_f32_schedule(params, workspace, nullptr).bytes;
}

void backward_f32(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  switch (backward_f32_head_dim(params.head_dim, params.head_dim_v)) {
    case 64:
      return run_backward_f32<64>(params, workspace, stream);
    case 128:
      return run_backward_f32<128>(params, workspace, stream);
    case 192:
      return run_backward_f32<192>(params, workspace, stream);
    default:
      return run_backward_f32<256>(params, workspace, stream);
  }
}

}  // namespace flash_ext::sm90
