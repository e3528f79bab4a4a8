// From dtype and head dims, which are numbers at run time, to the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/head_dim.h"
#include "kernels/common/tf32.h"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_kernel_types(const AttentionParams& p, Run run) {
  const auto with_head_dim = [&](auto element) {
    with_kernel_head_dim(p.head_dim, p.head_dim_v, [&](auto head_dim) { run(element, head_dim); });
  };
  switch (p.dtype) {
    case DType::kFloat16:
      return with_head_dim(__half());
    case DType::kBFloat16:
      return with_head_dim(__nv_bfloat16());
    case DType::kFloat32:
      return p.allow_tf32 ? with_head_dim(Tf32()) : with_head_dim(float());
    case DType::kFloat64:
      break;
  }
  fail("attention on CUDA takes float16, bfloat16 and float32");
}

}  // namespace flash_ext::sm80
