#include "kernels/common/head_dim.h"
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
  with_head_dim<64, 128, 192, 256>(backward_f32_head_dim(params.head_dim, params.head_dim_v), [&](auto head_dim) {
    run_backward_f32<decltype(head_dim)::value>(params, workspace, stream);
  });
}

}  // namespace flash_ext::sm90
