// What the host makes of a call before it launches the forward.
#pragma once

#include <algorithm>

#include "kernels/launch.h"
#include "kernels/sm90/common/tensor_map.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
ForwardMaps encode_maps(const ForwardParams& p) {
  return {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, kWarpgroupRows),
          encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kBlockN),
          encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kBlockN),
          encode_tensor_map(p.out, query_shape(p, p.head_dim_v), p.dtype, kWarpgroupRows)};
}

/// CTAs, each of which goes through several work tiles.
template <class Config, class Schedule>
unsigned forward_ctas(const Schedule& schedule) {
  return grid_size(std::min<int64_t>(schedule.size(), ctas_at_a_time(Config::kShape)));
}

}  // namespace flash_ext::sm90
