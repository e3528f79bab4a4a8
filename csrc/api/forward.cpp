#include <utility>

#include "attention.h"
#include "tensors.h"

namespace flash_ext::api {

ForwardCall prepare_forward(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options) {
  AttentionCall attention = prepare_attention(plan::Operation::kForward, q, k, v, options);
  const Geometry& g = attention.geometry;
  ForwardCall call{attention.plan,
                   {attention.params},
                   new_empty(q, g.out_shape(), q.scalar_type()),
                   new_empty(q, g.lse_shape(), accumulate_dtype(q.scalar_type())),
                   std::move(attention.owned)};
  call.params.out = view_rows(call.out);
  call.params.lse = view_lse(call.lse);
  call.params.num_splits = call.plan.num_splits;
  call.params.split_size = call.plan.split_size;
  return call;
}

}  // namespace flash_ext::api
