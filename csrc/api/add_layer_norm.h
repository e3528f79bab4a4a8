// The operator add_layer_norm before its launch: checks, allocation and parameters, shared by all devices.
#pragma once

#include "checks.h"

namespace flash_ext::api {

struct AddLayerNormCall {
  AddLayerNormParams params;
  Tensor sum;  // shape (0) if it is not wanted
  Tensor out;
  std::vector<Tensor> owned;  // what params points into besides the arguments and results
};

/// x and residual (..., width); weight and bias (width).
AddLayerNormCall prepare_add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, bool need_sum);

}  // namespace flash_ext::api
