// From dtype and head dims, which are numbers at run time, to the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "kernels/common/head_dim.h"
#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Calls run(Element()).
template <class Run>
void with_element(const AttentionParams& p, Run run) {
  if (p.dtype == DType::kFloat16) return run(__half());
  if (p.dtype == DType::kBFloat16) return run(__nv_bfloat16());
  throw std::runtime_error("flash_ext: attention on wgmma takes float16 and bfloat16");
}

/// Calls run(Element(), HeadDim<n>()).
template <class Run>
void with_kernel_types(const AttentionParams& p, Run run) {
  with_element(p, [&](auto element) {
    with_kernel_head_dim(p.head_dim, p.head_dim_v, [&](auto head_dim) { run(element, head_dim); });
  });
}

}  // namespace flash_ext::sm90
