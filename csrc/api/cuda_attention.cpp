// Attention on CUDA: workspaces, and the launch of the kernels that the plan names.
#include "cuda_stream.h"
#include "kernels.h"
#include "kernels/sm80/backward/backward.h"
#include "kernels/sm80/bias_gradient/bias_gradient.h"
#include "kernels/sm80/clear/clear.h"
#include "kernels/sm80/decode/append.h"
#include "kernels/sm80/decode/decode.h"
#include "kernels/sm80/forward/forward.h"
#include "kernels/sm80/max_logit/max_logit.h"
#include "kernels/sm80/weights/weights.h"
#include "kernels/sm90/backward/backward.h"
#include "kernels/sm90/backward_f32/backward_f32.h"
#include "kernels/sm90/backward_options/backward_options.h"
#include "kernels/sm90/backward_persistent/backward_persistent.h"
#include "kernels/sm90/backward_short/backward_short.h"
#include "kernels/sm90/backward_wide/backward_wide.h"
#include "kernels/sm90/bias_gradient/bias_gradient.h"
#include "kernels/sm90/forward/forward.h"
#include "kernels/sm90/forward_f32/forward_f32.h"
#include "kernels/sm90/forward_short/forward_short.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

/// Calls run(workspace, stream); the workspace is null where none is needed. It goes back to torch's allocator at once,
/// which gives it only to later work of the same stream.
template <class Run>
void with_workspace(const Tensor& like, int64_t bytes, Run run) {
  if (bytes == 0) return run(nullptr, stream_of(like));
  const Tensor workspace = new_empty(like, {bytes}, ScalarType::Byte);
  run(address(workspace), stream_of(like));
}

void run_bias_gradient(const Tensor& like, const plan::Plan& plan, const BackwardParams& params) {
  if (params.dbias.data == nullptr) return;
#ifndef FLASH_EXT_NO_SM90
  if (plan.bias_kernel == plan::KernelId::kSm90BiasGradient) {
    return with_workspace(like, sm90::bias_gradient_workspace_bytes(params), [&](void* workspace, cudaStream_t stream) {
      sm90::bias_gradient(params, workspace, stream);
    });
  }
#endif
  with_workspace(like, sm80::bias_gradient_workspace_bytes(params),
                 [&](void* workspace, cudaStream_t stream) { sm80::bias_gradient(params, workspace, stream); });
}

/// A backward, and the scratch memory that it needs.
struct BackwardKernel {
  int64_t (*workspace_bytes)(const BackwardParams&);
  void (*run)(const BackwardParams&, void*, cudaStream_t);
};

BackwardKernel backward_kernel(plan::KernelId id) {
  switch (id) {
#ifndef FLASH_EXT_NO_SM90
    case plan::KernelId::kSm90Backward:
      return {sm90::backward_workspace_bytes, sm90::backward};
    case plan::KernelId::kSm90BackwardPersistent:
      return {sm90::backward_persistent_workspace_bytes, sm90::backward_persistent};
    case plan::KernelId::kSm90BackwardOptions:
      return {sm90::backward_options_workspace_bytes, sm90::backward_options};
    case plan::KernelId::kSm90BackwardWide:
      return {sm90::backward_wide_workspace_bytes, sm90::backward_wide};
    case plan::KernelId::kSm90BackwardShort:
      return {sm90::backward_short_workspace_bytes, sm90::backward_short};
    case plan::KernelId::kSm90BackwardF32:
      return {sm90::backward_f32_workspace_bytes, sm90::backward_f32};
#endif
    default:
      return {sm80::backward_workspace_bytes, sm80::backward};
  }
}

void run_main_backward(const Tensor& like, const plan::Plan& plan, const BackwardParams& params) {
  const BackwardKernel kernel = backward_kernel(plan.kernel);
  with_workspace(like, kernel.workspace_bytes(params),
                 [&](void* workspace, cudaStream_t stream) { kernel.run(params, workspace, stream); });
}

void run_sm80_forward(const Tensor& like, const ForwardParams& params) {
  with_workspace(like, sm80::forward_workspace_bytes(params),
                 [&](void* workspace, cudaStream_t stream) { sm80::forward(params, workspace, stream); });
}

/// Computes out and lse, and max_logit if the kernel computes it itself.
void run_main_forward(const Tensor& like, const plan::Plan& plan, const ForwardParams& params) {
#ifndef FLASH_EXT_NO_SM90
  if (plan.kernel == plan::KernelId::kSm90Forward) {
    const int64_t block_n = plan.block_n;
    const KeySplits& splits = plan.key_splits;
    return with_workspace(
        like, sm90::forward_workspace_bytes(params, block_n, splits),
        [&](void* workspace, cudaStream_t stream) { sm90::forward(params, block_n, splits, workspace, stream); });
  }
  if (plan.kernel == plan::KernelId::kSm90ForwardShort)
    return sm90::forward_short(params, plan.block_n, stream_of(like));
  if (plan.kernel == plan::KernelId::kSm90ForwardF32) {
    return with_workspace(like, sm90::forward_f32_workspace_bytes(params),
                          [&](void* workspace, cudaStream_t stream) { sm90::forward_f32(params, workspace, stream); });
  }
#endif
  run_sm80_forward(like, params);
}

}  // namespace

void run_forward(const Tensor& like, const plan::Plan& plan, const ForwardParams& params) {
  sm80::clear_forward(params, stream_of(like));
  if (params.max_logit == nullptr || plan.fuses_max_logit) return run_main_forward(like, plan, params);
  ForwardParams without_max_logit = params;
  without_max_logit.max_logit = nullptr;
  run_main_forward(like, plan, without_max_logit);
  sm80::max_logit(params, stream_of(like));
}

void run_backward(const Tensor& like, const plan::Plan& plan, const BackwardParams& params) {
  sm80::clear_backward(params, stream_of(like));
  run_main_backward(like, plan, params);
  run_bias_gradient(like, plan, params);
}

void run_weights(const Tensor& like, const WeightsParams& params) { sm80::weights(params, stream_of(like)); }

void run_weights_backward(const Tensor& like, const plan::Plan& plan, const BackwardParams& params) {
  sm80::clear_backward(params, stream_of(like));
  sm80::weights_backward(params, stream_of(like));
  run_bias_gradient(like, plan, params);
}

void run_append(const Tensor& like, const AppendParams& params) { sm80::append(params, stream_of(like)); }

void run_decode(const Tensor& like, const plan::Plan& plan, const ForwardParams& params, bool appended) {
  if (plan.kernel != plan::KernelId::kSm80Decode) return run_forward(like, plan, params);  // chunks of prompts
  with_workspace(like, sm80::decode_workspace_bytes(params), [&](void* workspace, cudaStream_t stream) {
    if (params.seq.cu_seqlens_q) sm80::clear_forward(params, stream);
    sm80::decode(params, workspace, stream, appended);
  });
}

}  // namespace flash_ext::api
