// The operator merge and its backward before their launch: checks, allocation and parameters, shared by all devices.
#pragma once

#include "checks.h"

namespace flash_ext::api {

struct MergeCall {
  MergeParams params;
  Tensor out;
  Tensor lse;
  std::vector<Tensor> owned;  // what params points into besides the arguments and results
};

struct MergeBackwardCall {
  MergeBackwardParams params;
  Tensor grad_outs;
  Tensor grad_lses;
  std::vector<Tensor> owned;
};

/// outs (splits, batch, seqlen, heads, head_dim) and lses (splits, batch, heads, seqlen); varlen without batch.
MergeCall prepare_merge(const Tensor& outs, const Tensor& lses);

MergeBackwardCall prepare_merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                         const Tensor& outs, const Tensor& lses, const Tensor& out, const Tensor& lse);

}  // namespace flash_ext::api
