// What a CTA of the bias gradient keeps in shared memory.
#pragma once

#include "shape.h"

namespace flash_ext::sm80 {

/// A tile of scores that falls on the CTA's tile and has a visible pair.
struct BiasScoreTile {
  int batch, head, first_query, first_key, seqlen_q, seqlen_k;
  bool valid;
  bool outside_window, masked;  // whether some pair of it is hidden thereby
  bool is_full;                 // has no rows beyond the queries
  const void *q, *k, *v, *grad_out;
  const float *lse, *delta;  // null without
};
static_assert(sizeof(BiasScoreTile) == kBiasScoreTileBytes, "which the plan goes by");

}  // namespace flash_ext::sm80
