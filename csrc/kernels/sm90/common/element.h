// Turns dtype and head dims, which are numbers at run time, into the types that kernels are instantiated for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/common/head_dim.h"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm90 {

/// Calls run(Element()).
template <class Run>
void with_element(const AttentionParams& p, Run run) {
  if (p.dtype == DType::kFloat16) return run(__half());
  if (p.dtype == DType::kBFloat16) return run(__nv_bfloat16());
  fail("attention on wgmma takes float16 and bfloat16");
}

/// Calls run(Element(), HeadDim<n>()), as with_head_dim<kHeadDims...>() does.
template <int... kHeadDims, class Run>
void with_types_of(const AttentionParams& p, int head_dim, Run run) {
  with_element(p, [&](auto element) {
    with_head_dim<kHeadDims...>(head_dim, [&](auto of_kernel) { run(element, of_kernel); });
  });
}

}  // namespace flash_ext::sm90
