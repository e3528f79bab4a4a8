// The operators on CUDA: prepare the call on the tensors' device, run the kernel on torch's current stream.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "add_layer_norm.h"
#include "cuda_device.h"
#include "dropout.h"
#include "kernels/sm80/add_layer_norm/add_layer_norm.h"
#include "kernels/sm80/dropout_mask/dropout_mask.h"
#include "kernels/sm80/merge/merge.h"
#include "merge.h"

namespace flash_ext::api {
namespace {

using Tensors2 = std::tuple<Tensor, Tensor>;

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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("merge", TORCH_BOX(&merge));
  m.impl("merge_backward", TORCH_BOX(&merge_backward));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
}

}  // namespace flash_ext::api
