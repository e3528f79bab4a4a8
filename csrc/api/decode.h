// Attention over a key-value cache up to the launch, with or without appending to the cache first.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

/// In the order of ops.cpp.
struct DecodeOptions {
  double softmax_scale = 1.0;
  int64_t window_left = -1, window_right = -1;
  OptionalTensor cache_seqlens, block_table, cache_batch_idx;
  OptionalTensor rotary_cos, rotary_sin;
  bool rotary_interleaved = false;
  OptionalTensor cu_seqlens_q;
  int64_t max_seqlen_q = 0;
  double softcap = 0.0;
  OptionalTensor sink, alibi_slopes, cache_leftpad;
  int64_t num_splits = 0;
  bool batch_invariant = false;
  bool allow_tf32 = false;
};

/// New keys and values, (batch, seqlen_new, heads_kv, head_dim or head_dim_v).
struct NewTokens {
  const Tensor& k;
  const Tensor& v;
};

struct DecodeCall {
  plan::Plan plan;
  std::optional<AppendParams> append;  // to run first: it writes what params reads
  ForwardParams params;
  Tensor out;
  Tensor lse;
  std::vector<Tensor> owned;
};

DecodeCall prepare_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const std::optional<NewTokens>& tokens, const DecodeOptions& options);

}  // namespace flash_ext::api
