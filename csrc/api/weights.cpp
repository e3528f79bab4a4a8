#include <utility>

#include "attention.h"
#include "op_arguments.h"
#include "operators.h"

namespace flash_ext::api {

namespace {

Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor& lse, int64_t dropout_mode,
                         FLASH_EXT_SCORE_PARAMETERS) {
  const DeviceScope scope(q);
  const AttentionCall call = prepare_attention(plan::Operation::kWeights, q, k, std::nullopt, FLASH_EXT_SCORE_OPTIONS);
  const Geometry& g = call.geometry;
  check_lse(Argument("q", q), g, "lse", lse);
  check_dropout_mode(dropout_mode);

  const bool has_gaps = g.varlen_q;  // the kernel writes nothing beyond the end of a packed sequence
  const Tensor weights =
      has_gaps ? new_zeros(q, g.score_shape(), q.scalar_type()) : new_empty(q, g.score_shape(), q.scalar_type());
  const Tensor dense_lse = with_contiguous_rows(lse);
  WeightsParams params{call.params};
  params.lse = view_lse(dense_lse);
  params.weights = view_scores(weights);
  params.dropout_mode = static_cast<int>(dropout_mode);
  run_weights(q, params);
  return weights;
}

}  // namespace

FLASH_EXT_OPERATORS(m) { m.impl("attention_weights", TORCH_BOX(&attention_weights)); }

}  // namespace flash_ext::api
