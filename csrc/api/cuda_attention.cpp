// Attention forward and backward on CUDA: prepare the call, run the kernels on torch's current stream, return what they
// wrote.
#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "attention.h"
#include "attention_operators.h"
#include "cuda_device.h"
#include "kernels/sm80/backward/backward.h"
#include "kernels/sm80/bias_gradient/bias_gradient.h"
#include "kernels/sm80/clear/clear.h"
#include "kernels/sm80/forward/forward.h"
#include "kernels/sm90/backward/backward.h"
#include "kernels/sm90/backward_f32/backward_f32.h"
#include "kernels/sm90/backward_short/backward_short.h"
#include "kernels/sm90/bias_gradient/bias_gradient.h"
#include "kernels/sm90/forward/forward.h"
#include "kernels/sm90/forward_f32/forward_f32.h"
#include "op_arguments.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

void run_forward(const Tensor& q, const ForwardCall& call, cudaStream_t stream) {
  const auto with_workspace = [&](int64_t bytes, auto run) {
    if (bytes == 0) return run(nullptr);
    const Tensor workspace = new_empty(q, {bytes}, ScalarType::Byte);
    run(address(workspace));
  };
#ifndef FLASH_EXT_NO_SM90
  if (call.plan.kernel == plan::KernelId::kSm90Forward) {
    const int64_t block_n = call.plan.block_n;
    const sm90::KeySplits& splits = call.plan.key_splits;
    return with_workspace(sm90::forward_workspace_bytes(call.params, block_n, splits),
                          [&](void* workspace) { sm90::forward(call.params, block_n, splits, workspace, stream); });
  }
  if (call.plan.kernel == plan::KernelId::kSm90ForwardF32) {
    return with_workspace(sm90::forward_f32_workspace_bytes(call.params),
                          [&](void* workspace) { sm90::forward_f32(call.params, workspace, stream); });
  }
#endif
  with_workspace(sm80::forward_workspace_bytes(call.params),
                 [&](void* workspace) { sm80::forward(call.params, workspace, stream); });
}

void run_bias_gradient(const Tensor& q, const BackwardCall& call, cudaStream_t stream) {
  const auto workspace = [&](int64_t bytes) { return new_empty(q, {bytes}, ScalarType::Byte); };
#ifndef FLASH_EXT_NO_SM90
  if (call.plan.bias_kernel == plan::KernelId::kSm90BiasGradient) {
    const Tensor memory = workspace(sm90::bias_gradient_workspace_bytes(call.params));
    return sm90::bias_gradient(call.params, address(memory), stream);
  }
#endif
  const Tensor memory = workspace(sm80::bias_gradient_workspace_bytes(call.params));
  sm80::bias_gradient(call.params, address(memory), stream);
}

void run_backward(const Tensor& q, const BackwardCall& call, cudaStream_t stream) {
  const auto workspace = [&](int64_t bytes) { return new_empty(q, {bytes}, ScalarType::Byte); };
#ifndef FLASH_EXT_NO_SM90
  if (call.plan.kernel == plan::KernelId::kSm90Backward) {
    const Tensor memory = workspace(sm90::backward_workspace_bytes(call.params));
    return sm90::backward(call.params, address(memory), stream);
  }
  if (call.plan.kernel == plan::KernelId::kSm90BackwardShort) {
    const Tensor memory = workspace(sm90::backward_short_workspace_bytes(call.params));
    return sm90::backward_short(call.params, address(memory), stream);
  }
  if (call.plan.kernel == plan::KernelId::kSm90BackwardF32) {
    const Tensor memory = workspace(sm90::backward_f32_workspace_bytes(call.params));
    return sm90::backward_f32(call.params, address(memory), stream);
  }
#endif
  const Tensor memory = workspace(sm80::backward_workspace_bytes(call.params));
  sm80::backward(call.params, address(memory), stream);
}

}  // namespace

ForwardCall attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options) {
  const CudaDevice device(q);
  ForwardCall call = prepare_forward(q, k, v, options);
  sm80::clear_forward(call.params, device.stream());
  run_forward(q, call, device.stream());
  return call;
}

BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed) {
  const CudaDevice device(q);
  BackwardCall call = prepare_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  sm80::clear_backward(call.params, device.stream());
  run_backward(q, call, device.stream());
  if (needed.dbias) run_bias_gradient(q, call, device.stream());
  return call;
}

namespace {

using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensors5 attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, bool deterministic,
                            bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dsink,
                            FLASH_EXT_SCORE_PARAMETERS) {
  const CudaDevice device(q);
  const ScoreOptions options = FLASH_EXT_SCORE_OPTIONS;
  const Needed needed{need_dq, need_dk, need_dv, need_dbias, need_dsink, false};
  const BackwardCall call = attend_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), given(call.dv), given(call.dbias), finish_dsink(call, q, options)};
}

std::string attention_describe(const Tensor& q, const Tensor& k, const OptionalTensor& v, std::string operation,
                               bool deterministic, FLASH_EXT_SCORE_PARAMETERS) {
  const CudaDevice device(q);
  return describe_in_text(operation, q, k, v, FLASH_EXT_SCORE_OPTIONS, deterministic);
}

void attention_check(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS) {
  const CudaDevice device(q);
  prepare_attention(plan::Operation::kForward, q, k, v, FLASH_EXT_SCORE_OPTIONS);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CUDA, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_forward_plain", TORCH_BOX(&attention_forward_plain));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_describe", TORCH_BOX(&attention_describe));
  m.impl("attention_check", TORCH_BOX(&attention_check));
}

}  // namespace flash_ext::api
