// add_layer_norm up to the launch: checks, allocation and parameters, the same on every device.
#pragma once

#include "checks.h"

namespace flash_ext::api {

struct AddLayerNormCall {
  AddLayerNormParams params;
  Tensor sum;  // (0) where it is not wanted
  Tensor out;
  std::vector<Tensor> owned;  // what params points into besides the arguments and results
};

/// x and residual (..., width); weight and bias (width).
AddLayerNormCall prepare_add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps, bool need_sum);

}  // namespace flash_ext::api
