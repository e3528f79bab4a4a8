#include "operators.h"

namespace flash_ext::api {
namespace {

Tensor dropout_mask(const Tensor& rng, double dropout_p, int64_t batch, int64_t heads_q, int64_t seqlen_q,
                    int64_t seqlen_k) {
  const DeviceScope scope(rng);
  Argument("rng", rng).dtype_is(ScalarType::Long).shape_is({2}, "(2), seed and offset").contiguous();
  check(dropout_p >= 0 && dropout_p <= 1, "dropout_p must be in [0, 1], got ", dropout_p);
  const Shape shape = {batch, heads_q, seqlen_q, seqlen_k};
  const char* const names[] = {"batch", "heads_q", "seqlen_q", "seqlen_k"};
  for (size_t d = 0; d < shape.size(); ++d) check(shape[d] >= 0, names[d], " must be >= 0, got ", shape[d]);

  const Tensor keep = new_empty(rng, shape, ScalarType::Bool);
  DropoutMaskParams params;
  params.dropout = {static_cast<const int64_t*>(rng.const_data_ptr()), dropout_rule(dropout_p)};
  params.batch = batch;
  params.heads_q = heads_q;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.keep = static_cast<bool*>(address(keep));
  run_dropout_mask(rng, params);
  return keep;
}

}  // namespace

FLASH_EXT_OPERATORS(m) { m.impl("dropout_mask", TORCH_BOX(&dropout_mask)); }

}  // namespace flash_ext::api
