// The dropout mask, written out as booleans.
#pragma once

#include "attention.h"

namespace flash_ext::cpu {

/// keep[b, h, i, j] as common/dropout/philox.h decides it.
void dropout_mask(const DropoutMaskParams& params, ParallelFor parallel_for);

}  // namespace flash_ext::cpu
