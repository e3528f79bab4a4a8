// The largest score of each head of each batch entry, on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// float16, bfloat16, float32; rows of q and k start at multiples of 16 bytes. Raises what max_logit holds.
void max_logit(const ForwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
