// Attention forward on mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace flash_ext::sm80 {

/// out and lse of every row that a sequence covers. float16, bfloat16, float32; rows of q, k, v and out start at
/// multiples of 16 bytes.
void forward(const ForwardParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
