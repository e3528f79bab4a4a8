#include "../backward_f32.h"
#include "../backward_f32_work.cuh"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
template <int kHeadDim>
void run_backward_f32(const BackwardParams& params, void* workspace, cudaStream_t stream);

int64_t backward_f32_workspace_bytes(const BackwardParams& params) {
  return BackwardF32Workspace(params, nullptr).bytes;
}

void backward_f32(const BackwardParams& params, void* workspace, cudaStream_t stream) {
  with_kernel_head_dim(params.head_dim, params.head_dim_v,
                       [&](auto head_dim) { run_backward_f32<decltype(head_dim)::value>(params, workspace, stream); });
}

}  // namespace flash_ext::sm90
