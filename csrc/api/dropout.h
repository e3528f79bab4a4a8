// The operator dropout_mask before its launch: checks, allocation and parameters.
#pragma once

#include "checks.h"

namespace flash_ext::api {

struct DropoutMaskCall {
  DropoutMaskParams params;
  Tensor keep;
};

DropoutMaskCall prepare_dropout_mask(const Tensor& rng, double dropout_p, int64_t batch, int64_t heads_q,
                                     int64_t seqlen_q, int64_t seqlen_k);

}  // namespace flash_ext::api
