// Forward and backward of attention, shared by all devices: checks, allocation, parameters and the launch.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

/// Computes out and lse; and max_logit, if the caller gives a place for it.
Tensors2 attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options,
                OptionalTensor* max_logit = nullptr);

/// Which gradients are wanted.
struct Needed {
  bool dq = false, dk = false, dv = false, dbias = false, dsink = false, dlse = false;
};

/// A backward and its results. Gradients that are not wanted are absent.
struct BackwardCall {
  plan::Plan plan;
  BackwardParams params;
  OptionalTensor dq, dk, dv, dbias, dsink, dlse;
  std::vector<Tensor> owned;
};

/// Computes the gradients that are needed.
BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed);

}  // namespace flash_ext::api
