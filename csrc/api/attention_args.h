// From an operator's arguments to a plan and kernel parameters, the same on every device:
// tensors -> checks -> Problem -> Plan -> AttentionParams.
#pragma once

#include <string>

#include "score_options.h"

namespace flash_ext::api {

/// A checked call, as the planner sees it.
struct DescribedCall {
  Geometry geometry;
  plan::Problem problem;
};

/// Checks q, k, v (none for attention_weights) and the options. `deterministic` is asked of a backward.
DescribedCall describe_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                 const ScoreOptions& options, bool deterministic = false);

/// The same for the operation of that name, as text (plan/problem_text.h).
std::string describe_in_text(const std::string& operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                             const ScoreOptions& options, bool deterministic);

/// A checked and planned call. `owned` keeps what params points into besides the arguments.
struct AttentionCall {
  plan::Plan plan;
  AttentionParams params;
  Geometry geometry;
  std::vector<Tensor> owned;
};

/// describe_attention(), then plans and fills in all that is input.
AttentionCall prepare_attention(plan::Operation operation, const Tensor& q, const Tensor& k, const OptionalTensor& v,
                                const ScoreOptions& options, bool deterministic = false);

/// An lse (or its gradient) that belongs to a call.
void check_lse(const Argument& q, const Geometry& geometry, const char* name, const Tensor& lse);

/// attention_weights' treatment of dropped weights: see DropoutMode.
void check_dropout_mode(int64_t dropout_mode);

}  // namespace flash_ext::api
