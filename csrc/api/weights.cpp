#include <utility>

#include "attention.h"
#include "tensors.h"

namespace flash_ext::api {

WeightsCall prepare_weights(const Tensor& q, const Tensor& k, const Tensor& lse, const ScoreOptions& options,
                            int64_t dropout_mode) {
  AttentionCall attention = prepare_attention(plan::Operation::kWeights, q, k, std::nullopt, options);
  const Geometry& g = attention.geometry;
  check_lse(Argument("q", q), g, "lse", lse);
  check_dropout_mode(dropout_mode);

  WeightsCall call{
      attention.plan,
      attention.params,
      {},
      {},
      g.varlen_q ? new_zeros(q, g.score_shape(), q.scalar_type()) : new_empty(q, g.score_shape(), q.scalar_type()),
      std::move(attention.owned)};
  call.lse_view = view_lse(call.owned.emplace_back(with_contiguous_rows(lse)));
  call.weights_view = view_scores(call.weights);
  return call;
}

}  // namespace flash_ext::api
