#include "dropout.h"

#include "tensors.h"

namespace flash_ext::api {

DropoutMaskCall prepare_dropout_mask(const Tensor& rng, double dropout_p, int64_t batch, int64_t heads_q,
                                     int64_t seqlen_q, int64_t seqlen_k) {
  Argument("rng", rng).dtype_is(ScalarType::Long).shape_is({2}, "(2), seed and offset").contiguous();
  check(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1], got ", dropout_p);
  const Shape shape = {batch, heads_q, seqlen_q, seqlen_k};
  const char* const names[] = {"batch", "heads_q", "seqlen_q", "seqlen_k"};
  for (size_t d = 0; d < shape.size(); ++d) check(shape[d] >= 0, names[d], " must be >= 0, got ", shape[d]);

  DropoutMaskCall call{{}, new_empty(rng, shape, ScalarType::Bool)};
  call.params.dropout = {static_cast<const int64_t*>(rng.const_data_ptr()), dropout_rule(dropout_p)};
  call.params.batch = batch;
  call.params.heads_q = heads_q;
  call.params.seqlen_q = seqlen_q;
  call.params.seqlen_k = seqlen_k;
  call.params.keep = static_cast<bool*>(address(call.keep));
  return call;
}

}  // namespace flash_ext::api
