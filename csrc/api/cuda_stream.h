// The stream of an operator's CUDA work.
#pragma once

#include <cuda_runtime_api.h>

#include "checks.h"

namespace flash_ext::api {

/// torch's current stream of the tensor's device.
cudaStream_t stream_of(const Tensor& tensor);

}  // namespace flash_ext::api
