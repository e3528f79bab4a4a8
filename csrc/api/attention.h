// Forward, backward and attention weights before their launch: checks, allocation and parameters, shared by all
// devices.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

struct ForwardCall {
  plan::Plan plan;
  ForwardParams params;
  Tensor out;
  Tensor lse;
  std::vector<Tensor> owned;
};

ForwardCall prepare_forward(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options);

/// prepare_forward() and the kernel. Each library defines it for its device.
ForwardCall attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options);

/// Which gradients are wanted.
struct Needed {
  bool dq = false, dk = false, dv = false, dbias = false, dsink = false, dlse = false;
};

/// Gradients that are not wanted are absent.
struct BackwardCall {
  plan::Plan plan;
  BackwardParams params;
  OptionalTensor dq, dk, dv, dbias, dsink, dlse;
  std::vector<Tensor> owned;
};

BackwardCall prepare_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                              const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                              const ScoreOptions& options, bool deterministic, const Needed& needed);

/// prepare_backward() and the kernels. Each library defines it for its device.
BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed);

/// The gradient, or an empty tensor, which operators return for a gradient that is not wanted.
Tensor gradient_or_empty(const OptionalTensor& gradient, const Tensor& like);

/// dsink converted from the accumulate type to sink's dtype, or an empty tensor.
Tensor finish_dsink(const BackwardCall& call, const Tensor& q, const ScoreOptions& options);

struct WeightsCall {
  plan::Plan plan;
  AttentionParams params;
  LseView lse_view;
  ScoreView weights_view;
  Tensor weights;
  std::vector<Tensor> owned;
};

WeightsCall prepare_weights(const Tensor& q, const Tensor& k, const Tensor& lse, const ScoreOptions& options,
                            int64_t dropout_mode);

BackwardCall prepare_weights_backward(const Tensor& grad_weights, const Tensor& q, const Tensor& k, const Tensor& lse,
                                      const ScoreOptions& options, int64_t dropout_mode, const Needed& needed);

}  // namespace flash_ext::api
