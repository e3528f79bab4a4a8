// Forward, backward and attention weights before their launch: checks, allocation and parameters, shared by all
// devices.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

/// The forward: out and lse; and, if there is a place for it, max_logit.
Tensors2 attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options,
                OptionalTensor* max_logit = nullptr);

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

/// The backward.
BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed);

}  // namespace flash_ext::api
