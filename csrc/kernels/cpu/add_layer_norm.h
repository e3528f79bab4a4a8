// The sum of two rows and its layer norm: s = round(x + residual), out = (s - mean) / sqrt(var + eps) * weight + bias.
#pragma once

#include "attention.h"

namespace flash_ext::cpu {

void add_layer_norm(const AddLayerNormParams& params, ParallelFor parallel_for);

}  // namespace flash_ext::cpu
