// The head dims that CUDA kernels of attention are instantiated for, but for the forward for Hopper, which has more of
// them (sm90/forward/shape.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace flash_ext {

/// That of the kernel which serves q, k of head_dim and v of head_dim_v: rows are filled up by zeros in shared memory,
/// never in the tensors.
constexpr int kernel_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t larger = std::max(head_dim, head_dim_v);
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}

template <int kHeadDim>
using HeadDim = std::integral_constant<int, kHeadDim>;

/// Calls run(HeadDim<n>()) for that head dim.
template <class Run>
void with_kernel_head_dim(int64_t head_dim, int64_t head_dim_v, Run run) {
  switch (kernel_head_dim(head_dim, head_dim_v)) {
    case 64:
      return run(HeadDim<64>());
    case 128:
      return run(HeadDim<128>());
    default:
      return run(HeadDim<256>());
  }
}

}  // namespace flash_ext
