#include "kernels/sm90/bias_gradient/bias_gradient.h"
#include "kernels/sm90/bias_gradient/kernel.cuh"
#include "kernels/sm90/bias_gradient/shape.h"
#include "kernels/sm90/common/dispatch.h"

namespace flash_ext::sm90 {

// Instantiated in the files beside this one.
extern template void run_bias_gradient<__nv_bfloat16, 64>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__nv_bfloat16, 128>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__half, 64>(const BackwardParams&, void*, cudaStream_t);
extern template void run_bias_gradient<__half, 128>(const BackwardParams&, void*, cudaStream_t);

bool serves_bias_gradient(const BackwardParams& p) {
  if (kernel_head_dim(p.head_dim, p.head_dim_v) > kMaxBiasHeadDim) return false;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return false;
  if (p.mask.data || p.blocks.offsets || p.dropout.p > 0 || p.grad_weights.data || !p.grad_out.data) return false;
  if (p.batch == 0 || p.seqlen_q == 0 || p.seqlen_k == 0 || p.seq.block_table) return false;
  const auto steps = [](const TensorView& view, int64_t rows, int64_t heads, int64_t batch) {
    return (rows <= 1 || view.row_stride != 0) && (heads <= 1 || view.head_stride != 0) &&
           (batch <= 1 || view.batch_stride != 0);
  };
  const TensorShape queries = query_shape(p, p.head_dim), keys = key_shape(p, p.head_dim);
  const bool distinct = steps(p.q, queries.rows, queries.heads, queries.batch) &&
                        steps(p.grad_out, queries.rows, queries.heads, queries.batch) &&
                        steps(p.k, keys.rows, keys.heads, keys.batch) && steps(p.v, keys.rows, keys.heads, keys.batch);
  return distinct && p.dbias.col_stride == 1 && can_stage_bias(p.bias);
}

int64_t bias_gradient_workspace_bytes(const BackwardParams& p) {
  return BiasMemory(p, bias_tiles<__half>(p), nullptr).bytes;
}

void bias_gradient(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  with_kernel_types(p, [&](auto element, auto head_dim) {
    if constexpr (decltype(head_dim)::value <= kMaxBiasHeadDim) {
      run_bias_gradient<decltype(element), decltype(head_dim)::value>(p, workspace, stream);
    }
  });
}

}  // namespace flash_ext::sm90
