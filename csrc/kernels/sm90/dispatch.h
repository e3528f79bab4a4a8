// From dtype and head dims, which are numbers at run time, to the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <type_traits>

#include "../params.h"
#include "forward_shape.h"

namespace flash_ext::sm90 {

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
  if (p.dtype == DType::kFloat16) return with_head_dim(__half());
  if (p.dtype == DType::kBFloat16) return with_head_dim(__nv_bfloat16());
  throw std::runtime_error("flash_ext: attention on wgmma takes float16 and bfloat16");
}

}  // namespace flash_ext::sm90
