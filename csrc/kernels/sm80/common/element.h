// From a dtype to its C++ type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Calls run with a value of the element type of q, k and v.
template <class Run>
void with_element(DType dtype, Run run) {
  switch (dtype) {
    case DType::kFloat16:
      return run(__half());
    case DType::kBFloat16:
      return run(__nv_bfloat16());
    case DType::kFloat32:
      return run(float());
    case DType::kFloat64:
      break;
  }
  fail("CUDA kernels take float16, bfloat16 and float32");
}

}  // namespace flash_ext::sm80
