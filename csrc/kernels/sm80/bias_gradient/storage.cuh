// What a CTA of the bias gradient keeps in shared memory.
#pragma once

#include "shape.h"

namespace flash_ext::sm80 {

/// A tile of scores that falls on the CTA's tile and has a visible pair.
struct BiasScoreTile {
  int batch, head, first_query, first_key, seqlen_q, seqlen_k;
  bool valid;
  bool outside_window, masked;  // whether the window or lengths, or masks, hide some pair
  bool is_full;                 // has no rows beyond the queries
  const void *q, *k, *v, *grad_out;
  const float *lse, *delta;  // delta: null with grad_weights
};
static_assert(sizeof(BiasScoreTile) == kBiasScoreTileBytes, "which the plan goes by");

}  // namespace flash_ext::sm80
