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

/// Which gradients are asked for. The others come back empty.
struct Needed {
  bool dq = false, dk = false, dv = false, dbias = false, dsink = false, dlse = false;
};

struct BackwardCall {
  plan::Plan plan;
  BackwardParams params;
  Tensor dq, dk, dv, dbias, dsink, dlse;
  std::vector<Tensor> owned;
};

BackwardCall prepare_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                              const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                              const ScoreOptions& options, bool deterministic, const Needed& needed);

/// dsink is computed in the accumulate type; this is the gradient in sink's own.
Tensor finish_dsink(const BackwardCall& call, const ScoreOptions& options);

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
