// The attention weights and their backward on CUDA: prepare the call, run the kernels on torch's current stream, return
// what they wrote.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "attention.h"
#include "cuda_device.h"
#include "kernels/sm80/bias_gradient/bias_gradient.h"
#include "kernels/sm80/clear/clear.h"
#include "kernels/sm80/weights/weights.h"
#include "op_arguments.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor& lse, int64_t dropout_mode,
                         FLASH_EXT_SCORE_PARAMETERS) {
  const CudaDevice device(q);
  const WeightsCall call = prepare_weights(q, k, lse, FLASH_EXT_SCORE_OPTIONS, dropout_mode);
  sm80::weights({call.params, call.lse_view, call.weights_view, static_cast<int>(dropout_mode)}, device.stream());
  return call.weights;
}

Tensors4 attention_weights_backward(const Tensor& grad_weights, const Tensor& q, const Tensor& k, const Tensor& lse,
                                    int64_t dropout_mode, bool need_dq, bool need_dk, bool need_dlse, bool need_dbias,
                                    FLASH_EXT_SCORE_PARAMETERS) {
  const CudaDevice device(q);
  const Needed needed{need_dq, need_dk, false, need_dbias, false, need_dlse};
  const BackwardCall call =
      prepare_weights_backward(grad_weights, q, k, lse, FLASH_EXT_SCORE_OPTIONS, dropout_mode, needed);
  sm80::clear_backward(call.params, device.stream());
  sm80::weights_backward(call.params, device.stream());
  if (call.params.dbias.data != nullptr) {
    const Tensor workspace = new_empty(q, {sm80::bias_gradient_workspace_bytes(call.params)}, ScalarType::Byte);
    sm80::bias_gradient(call.params, address(workspace), device.stream());
  }
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), gradient_or_empty(call.dlse, lse), given(call.dbias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("attention_weights", TORCH_BOX(&attention_weights));
  m.impl("attention_weights_backward", TORCH_BOX(&attention_weights_backward));
}

}  // namespace flash_ext::api
