// Attention over a key-value cache up to the launch, with or without appending to the cache first.
#pragma once

#include "attention_args.h"

namespace flash_ext::api {

struct DecodeOptions {
  FLASH_EXT_DECODE_OPTION_LIST(FLASH_EXT_FIRST_MEMBER, FLASH_EXT_MEMBER)
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

/// Of a checked call that appends nothing.
plan::Problem describe_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                              const DecodeOptions& options);

DecodeCall prepare_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const std::optional<NewTokens>& tokens, const DecodeOptions& options);

}  // namespace flash_ext::api
