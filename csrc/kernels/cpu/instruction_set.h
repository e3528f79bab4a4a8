// The table of all operations, compiled for the instruction set of this translation unit.
#pragma once

#include "backward.h"
#include "bias_gradient.h"
#include "clear.h"
#include "forward.h"
#include "row_terms.h"
#include "weights.h"

namespace flash_ext::cpu::FLASH_EXT_ISA {

template <class T>
constexpr Kernels kernels() {
  Kernels k{};
  k.accumulate_bytes = sizeof(T);
  k.count_tiles = count_tiles;
  k.clear_forward = {clear_forward_items, no_scratch<ForwardJob>, clear_forward_item<T>};
  k.packed_key_bytes = packed_key_bytes<T>;
  k.pack_keys = {pack_keys_items, pack_keys_scratch<T>, pack_keys_item<T>};
  k.forward = {forward_items, forward_scratch<T>, forward_item<T>};
  k.merge_splits = {merge_items, merge_scratch<T>, merge_item<T>};
  k.max_logit = {max_logit_items, no_scratch<ForwardJob>, max_logit_item<T>};
  k.weights = {weights_items, weights_scratch<T>, weights_item<T>};
  k.clear_backward = {clear_backward_items, no_scratch<BackwardJob>, clear_backward_item<T>};
  k.row_terms = {row_term_items, row_term_scratch<T>, row_term_item<T>};
  k.gradients = {gradient_items, gradient_scratch<T>, gradient_item<T>};
  k.reduce_dq = {reduce_dq_items, reduce_dq_scratch<T>, reduce_dq_item<T>};
  k.bias_gradient = {bias_gradient_items, bias_gradient_scratch<T>, bias_gradient_item<T>};
  k.sink_gradient = {sink_gradient_items, no_scratch<BackwardJob>, sink_gradient_item<T>};
  return k;
}

}  // namespace flash_ext::cpu::FLASH_EXT_ISA
