// From dtype and head dims, which are numbers at run time, to the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <type_traits>

#include "../params.h"
#include "config.h"
#include "tf32.h"

namespace flash_ext::sm80 {

template <int kHeadDim>
using HeadDim = std::integral_constant<int, kHeadDim>;

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_kernel_types(const AttentionParams& p, Run run) {
  const auto with_head_dim = [&](auto element) {
    switch (kernel_head_dim(p.head_dim, p.head_dim_v)) {
      case 64:
        return run(element, HeadDim<64>());
      case 128:
        return run(element, HeadDim<128>());
      default:
        return run(element, HeadDim<256>());
    }
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
  throw std::runtime_error("flash_ext: attention on CUDA takes float16, bfloat16 and float32");
}

}  // namespace flash_ext::sm80
