// Operators that differ between devices only in attend().
#pragma once

#include <tuple>

#include "attention.h"
#include "op_arguments.h"

namespace flash_ext::api {

using OutAndLse = std::tuple<Tensor, Tensor>;

inline OutAndLse attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS,
                                   bool /*deterministic*/) {
  const ForwardCall call = attend(q, k, v, FLASH_EXT_SCORE_OPTIONS);
  return {call.out, call.lse};
}

inline OutAndLse attention_forward_plain(const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale,
                                         int64_t window_left, int64_t window_right, bool top_left) {
  const ForwardCall call = attend(q, k, v, {softmax_scale, window_left, window_right, top_left});
  return {call.out, call.lse};
}

}  // namespace flash_ext::api
