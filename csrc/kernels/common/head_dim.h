// The head dims that CUDA attention kernels are instantiated for. Hopper's kernels have more
// (sm90/forward/shape.h, sm90/common/backward/shape.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace flash_ext {

/// The head dim of the kernel that serves q, k of head_dim and v of head_dim_v. Rows are padded with zeros in shared
/// memory, never in the tensors.
constexpr int kernel_head_dim(int64_t head_dim, int64_t head_dim_v) {
  const int64_t larger = std::max(head_dim, head_dim_v);
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}

template <int kHeadDim>
using HeadDim = std::integral_constant<int, kHeadDim>;

/// Calls run(HeadDim<n>()) with the head dim of the list that equals head_dim; with the last one if no other does.
template <int kFirst, int... kOthers, class Run>
void with_head_dim(int head_dim, Run run) {
  if constexpr (sizeof...(kOthers) > 0) {
    if (head_dim != kFirst) return with_head_dim<kOthers...>(head_dim, run);
  }
  run(HeadDim<kFirst>());
}

/// Calls run() with the head dim of the kernel that serves a call.
template <class Run>
void with_kernel_head_dim(int64_t head_dim, int64_t head_dim_v, Run run) {
  with_head_dim<64, 128, 256>(kernel_head_dim(head_dim, head_dim_v), run);
}

}  // namespace flash_ext
