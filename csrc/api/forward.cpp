#include <cmath>
#include <utility>

#include "attention.h"
#include "op_arguments.h"
#include "operators.h"

namespace flash_ext::api {

Tensors2 attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options,
                OptionalTensor* max_logit) {
  const DeviceScope scope(q);
  const AttentionCall call = prepare_attention(plan::Operation::kForward, q, k, v, options, /*deterministic=*/false,
                                               /*wants_max_logit=*/max_logit != nullptr);
  const Geometry& g = call.geometry;
  const Tensor out = new_empty(q, g.out_shape(), q.scalar_type());
  const Tensor lse = new_empty(q, g.lse_shape(), accumulate_dtype(q.scalar_type()));
  ForwardParams params{call.params};
  params.out = view_rows(out);
  params.lse = view_lse(lse);
  if (max_logit != nullptr) {
    *max_logit = new_full(q, {g.batch, g.heads_q}, accumulate_dtype(q.scalar_type()), -INFINITY);
    params.max_logit = address(**max_logit);
  }
  params.num_splits = call.plan.num_splits;
  params.split_size = call.plan.split_size;
  run_forward(q, call.plan, params);
  return {out, lse};
}

namespace {

Tensors2 attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS,
                           bool /*deterministic*/) {
  return attend(q, k, v, FLASH_EXT_SCORE_OPTIONS);
}

Tensors3 attention_forward_max_logit(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS,
                                     bool /*deterministic*/) {
  OptionalTensor max_logit;
  const auto [out, lse] = attend(q, k, v, FLASH_EXT_SCORE_OPTIONS, &max_logit);
  return {out, lse, *max_logit};
}

Tensors2 attention_forward_plain(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale,
                                 int64_t window_left, int64_t window_right, bool top_left) {
  return attend(q, k, v, {softmax_scale, window_left, window_right, top_left});
}

std::string attention_describe(const Tensor& q, const Tensor& k, const OptionalTensor& v, std::string operation,
                               bool deterministic, bool wants_max_logit, FLASH_EXT_SCORE_PARAMETERS) {
  const DeviceScope scope(q);
  return describe_in_text(operation, q, k, v, FLASH_EXT_SCORE_OPTIONS, deterministic, wants_max_logit);
}

void attention_check(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS) {
  const DeviceScope scope(q);
  prepare_attention(plan::Operation::kForward, q, k, v, FLASH_EXT_SCORE_OPTIONS);
}

}  // namespace

FLASH_EXT_OPERATORS(m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_forward_max_logit", TORCH_BOX(&attention_forward_max_logit));
  m.impl("attention_forward_plain", TORCH_BOX(&attention_forward_plain));
  m.impl("attention_describe", TORCH_BOX(&attention_describe));
  m.impl("attention_check", TORCH_BOX(&attention_check));
}

}  // namespace flash_ext::api
