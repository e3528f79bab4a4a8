// The operators on CUDA: prepare the call on the tensors' device, run the kernel on torch's current stream.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "add_layer_norm.h"
#include "block_lists.h"
#include "cuda_device.h"
#include "dropout.h"
#include "kernels/sm80/add_layer_norm/add_layer_norm.h"
#include "kernels/sm80/block_lists/block_lists.h"
#include "kernels/sm80/dropout_mask/dropout_mask.h"
#include "kernels/sm80/merge/merge.h"
#include "merge.h"

namespace flash_ext::api {
namespace {

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_dtype(const char* name, const Tensor& tensor) {
  Argument(name, tensor).dtype_in({ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
}

Tensors2 merge(const Tensor& outs, const Tensor& lses) {
  check_dtype("outs", outs);
  const CudaDevice device(outs);
  const MergeCall call = prepare_merge(outs, lses);
  sm80::merge(call.params, device.stream());
  return {call.out, call.lse};
}

Tensors2 merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& outs,
                        const Tensor& lses, const Tensor& out, const Tensor& lse) {
  check_dtype("outs", outs);
  const CudaDevice device(outs);
  const MergeBackwardCall call = prepare_merge_backward(grad_out, grad_lse, outs, lses, out, lse);
  sm80::merge_backward(call.params, device.stream());
  return {call.grad_outs, call.grad_lses};
}

Tensors2 add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool need_sum) {
  check_dtype("x", x);
  const CudaDevice device(x);
  const AddLayerNormCall call = prepare_add_layer_norm(x, residual, weight, bias, eps, need_sum);
  sm80::add_layer_norm(call.params, device.stream());
  return {call.sum, call.out};
}

Tensor dropout_mask(const Tensor& rng, double dropout_p, int64_t batch, int64_t heads_q, int64_t seqlen_q,
                    int64_t seqlen_k) {
  const CudaDevice device(rng);
  const DropoutMaskCall call = prepare_dropout_mask(rng, dropout_p, batch, heads_q, seqlen_q, seqlen_k);
  sm80::dropout_mask(call.params, device.stream());
  return call.keep;
}

Tensors4 interval_block_lists(const Tensor& bounds, std::string rule, int64_t seqlen_q, int64_t seqlen_k,
                              int64_t block_m, int64_t block_n, int64_t offset, int64_t window_left,
                              int64_t window_right, int64_t num_global, bool causal, int64_t max_blocks,
                              int64_t max_bitmaps) {
  const CudaDevice device(bounds);
  const auto call =
      prepare_interval_block_lists(bounds, {rule, seqlen_q, seqlen_k, block_m, block_n, offset, window_left,
                                            window_right, num_global, causal, max_blocks, max_bitmaps});
  sm80::interval_block_lists(call.params, device.stream());
  return call.lists.tensors();
}

Tensors4 block_lists_transposed(const Tensor& offsets, const Tensor& indices, const Tensor& bitmap_ids,
                                const Tensor& bitmaps, int64_t columns, int64_t max_blocks) {
  const CudaDevice device(offsets);
  const auto call = prepare_block_lists_transposed(offsets, indices, bitmap_ids, bitmaps, columns, max_blocks);
  sm80::block_lists_transposed(call.params, device.stream());
  return call.lists.tensors();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("merge", TORCH_BOX(&merge));
  m.impl("merge_backward", TORCH_BOX(&merge_backward));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
  m.impl("interval_block_lists", TORCH_BOX(&interval_block_lists));
  m.impl("block_lists_transposed", TORCH_BOX(&block_lists_transposed));
}

}  // namespace flash_ext::api
