// Arguments of the backward's main kernels.
#pragma once

#include "kernels/common/backward/schedule.cuh"
#include "kernels/common/backward/workspace.h"
#include "kernels/common/tensor_map.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// What a main kernel takes besides the call's BackwardParams.
template <class Maps>
struct BackwardArgumentsOf {
  const Maps& maps;
  const BackwardWorkspace& workspace;
  const BackwardSchedule& schedule;
  float scale;  // factor of products: gives scores to base 2 or, with a softcap, the argument of its tanh
};
using BackwardArguments = BackwardArgumentsOf<BackwardMaps>;

/// Encodes the maps of Q, K, V and dO. `query_rows`: rows of Q or dO that one load brings.
template <class Config>
BackwardMaps backward_maps(const BackwardParams& p, int query_rows = Config::kBlockM) {
  return {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, query_rows),
          encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kLoadedKeys),
          encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kLoadedKeys),
          encode_tensor_map(p.grad_out, query_shape(p, p.head_dim_v), p.dtype, query_rows)};
}

inline BackwardRowMaps row_maps(const TensorView& view, const TensorShape& shape, DType dtype) {
  if (!view.data) return {};
  return {encode_tensor_map(view, shape, dtype, kRowsOfWarp), encode_tensor_map(view, shape, dtype, 1)};
}
inline BackwardStoringMaps storing_maps(const BackwardParams& p, const BackwardMaps& maps) {
  return {maps, row_maps(p.dk, key_shape(p, p.head_dim), p.dtype), row_maps(p.dv, key_shape(p, p.head_dim_v), p.dtype)};
}

}  // namespace flash_ext::sm90
