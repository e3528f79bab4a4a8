// From an operator's arguments to a plan and kernel parameters, the same on every device:
// tensors -> checks -> Problem -> Plan -> AttentionParams.
#pragma once

#include <string>

#include "score_options.h"

namespace flash_ext::api {

/// A checked call as the plan sees it.
struct DescribedCall {
  Geometry geometry;
  plan::Problem problem;
};

/// Checks q, k, v (absent for attention_weights) and the options. `deterministic` matters to a backward,
/// `wants_max_logit` to a forward.
DescribedCall describe_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                 const ScoreOptions& options, bool deterministic = false, bool wants_max_logit = false);

/// The problem of the operation of that name, as text (plan/problem_text.h).
std::string describe_in_text(const std::string& operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                             const ScoreOptions& options, bool deterministic, bool wants_max_logit);

/// A checked and planned call. `owned` keeps tensors alive that params points into, other than the arguments.
struct AttentionCall {
  plan::Plan plan;
  AttentionParams params;
  Geometry geometry;
  std::vector<Tensor> owned;
};

/// describe_attention(), then plans the call and fills in the inputs.
AttentionCall prepare_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                const ScoreOptions& options, bool deterministic = false, bool wants_max_logit = false);

/// Checks that an lse (or its gradient) has the shape and dtype of a call.
void check_lse(const Argument& q, const Geometry& geometry, const char* name, const Tensor& lse);

/// Checks dropout_mode of attention_weights: see DropoutMode.
void check_dropout_mode(int64_t dropout_mode);

}  // namespace flash_ext::api
