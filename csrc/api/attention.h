// Forward, backward and the attention weights up to the launch: checked arguments, allocated results, parameters.
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

/// The same with the kernel run, which each library has for its device.
ForwardCall attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options);

/// Which gradients are asked for.
struct Needed {
  bool dq = false, dk = false, dv = false, dbias = false, dsink = false, dlse = false;
};

/// Gradients that were not asked for are not there.
struct BackwardCall {
  plan::Plan plan;
  BackwardParams params;
  OptionalTensor dq, dk, dv, dbias, dsink, dlse;
  std::vector<Tensor> owned;
};

BackwardCall prepare_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                              const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                              const ScoreOptions& options, bool deterministic, const Needed& needed);

/// The same with the kernels run, which each library has for its device.
BackwardCall differentiate(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                           const ScoreOptions& options, bool deterministic, const Needed& needed);

/// As operators return it: an empty tensor stands for a gradient that was not asked for.
Tensor gradient_or_empty(const OptionalTensor& gradient, const Tensor& like);

/// dsink is computed in the accumulate type; this is the gradient in sink's own, or the empty one.
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
