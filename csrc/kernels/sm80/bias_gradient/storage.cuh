// What a CTA of the bias gradient keeps in shared memory.
#pragma once

namespace flash_ext::sm80 {

/// A CTA's shared memory: stages of slabs; the bias; for each score tile under way its metadata, and words of masks.
struct BiasShared {
  int stages;
  bool stages_bias;
  int bias_at, search_at, score_tiles_at, words_at, bytes;
};

/// A tile of scores that falls on the CTA's tile and has a visible pair.
struct BiasScoreTile {
  int batch, head, first_query, first_key, seqlen_q, seqlen_k;
  bool valid;
  bool outside_window, masked;  // whether some pair of it is hidden thereby
  bool is_full;                 // has no rows beyond the queries
  const void *q, *k, *v, *grad_out;
  const float *lse, *delta;  // null without
};

}  // namespace flash_ext::sm80
