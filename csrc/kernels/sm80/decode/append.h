// New keys and values written into a cache, with rotary embedding of the keys and of q.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/params.h"

namespace flash_ext::sm80 {

/// float16, bfloat16 and float32; rows may lie anywhere.
void append(const AppendParams& params, cudaStream_t stream);

}  // namespace flash_ext::sm80
