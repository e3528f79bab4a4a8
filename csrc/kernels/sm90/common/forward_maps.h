// The tensor maps of a forward.
#pragma once

#include "kernels/common/tensor_map.h"
#include "kernels/ptx/tensor_map.h"
#include "kernels/sm90/common/warpgroup.h"

namespace flash_ext::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v, out;

  __device__ __forceinline__ void prefetch() const {
    ptx::prefetch_tensor_map(&q);
    ptx::prefetch_tensor_map(&k);
    ptx::prefetch_tensor_map(&v);
    ptx::prefetch_tensor_map(&out);
  }
};

/// Maps for copies of a warpgroup's rows of q and out, and of key_rows rows of k and v.
inline ForwardMaps encode_forward_maps(const ForwardParams& p, int key_rows) {
  return {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, kWarpgroupRows),
          encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, key_rows),
          encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, key_rows),
          encode_tensor_map(p.out, query_shape(p, p.head_dim_v), p.dtype, kWarpgroupRows)};
}

}  // namespace flash_ext::sm90
