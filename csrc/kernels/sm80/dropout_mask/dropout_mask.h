// The dropout mask as booleans.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

void dropout_mask(const DropoutMaskParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
