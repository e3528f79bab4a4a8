// From dtype and head dims, which are numbers at run time, to the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "../common/head_dim.h"
#include "../params.h"

namespace flash_ext::sm90 {

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_kernel_types(const AttentionParams& p, Run run) {
  const auto with_head_dim = [&](auto element) {
    with_kernel_head_dim(p.head_dim, p.head_dim_v, [&](auto head_dim) { run(element, head_dim); });
  };
  if (p.dtype == DType::kFloat16) return with_head_dim(__half());
  if (p.dtype == DType::kBFloat16) return with_head_dim(__nv_bfloat16());
  throw std::runtime_error("flash_ext: attention on wgmma takes float16 and bfloat16");
}

}  // namespace flash_ext::sm90
