// Attention over a key-value cache before its launch, with or without appending to the cache.
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
  std::optional<AppendParams> append;  // must run first: it writes what params reads
  ForwardParams params;
  Tensor out;
  Tensor lse;
  std::vector<Tensor> owned;
};

/// The problem of a call that appends nothing, after its checks.
plan::Problem describe_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                              const DecodeOptions& options);

DecodeCall prepare_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                          const std::optional<NewTokens>& tokens, const DecodeOptions& options);

}  // namespace flash_ext::api
