// The parameter lists that operators share, as functions take them and as structs hold them. They mirror the macros
// of ops.cpp word for word: TORCH_BOX needs functions with one parameter per operator argument.
#pragma once

#include "decode.h"
#include "score_options.h"

#define FLASH_EXT_SCORE_PARAMETERS                                                                                \
  const OptionalTensor &bias, const OptionalTensor &sink, const OptionalTensor &mask,                             \
      const OptionalTensor &alibi_slopes, const OptionalTensor &cu_seqlens_q, const OptionalTensor &cu_seqlens_k, \
      const OptionalTensor &seqused_q, const OptionalTensor &seqused_k, const OptionalTensor &block_offsets,      \
      const OptionalTensor &block_indices, const OptionalTensor &block_bitmap_ids,                                \
      const OptionalTensor &block_bitmaps, const OptionalTensor &rng_state, int64_t max_seqlen_q,                 \
      int64_t max_seqlen_k, double softmax_scale, double softcap, int64_t window_left, int64_t window_right,      \
      bool top_left, double dropout_p, bool allow_tf32

#define FLASH_EXT_SCORE_OPTIONS                                                                                      \
  ScoreOptions {                                                                                                     \
    bias, sink, mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_offsets, block_indices,  \
        block_bitmap_ids, block_bitmaps, rng_state, max_seqlen_q, max_seqlen_k, softmax_scale, softcap, window_left, \
        window_right, top_left, dropout_p, allow_tf32                                                                \
  }

#define FLASH_EXT_DECODE_PARAMETERS                                                                                \
  const OptionalTensor &cache_seqlens, const OptionalTensor &cache_leftpad, const OptionalTensor &cache_batch_idx, \
      const OptionalTensor &block_table, const OptionalTensor &rotary_cos, const OptionalTensor &rotary_sin,       \
      const OptionalTensor &alibi_slopes, const OptionalTensor &sink, const OptionalTensor &cu_seqlens_q,          \
      int64_t max_seqlen_q, double softmax_scale, double softcap, int64_t window_left, int64_t window_right,       \
      bool rotary_interleaved, int64_t num_splits, bool batch_invariant, bool allow_tf32

#define FLASH_EXT_DECODE_OPTIONS                                                                                       \
  DecodeOptions {                                                                                                      \
    cache_seqlens, cache_leftpad, cache_batch_idx, block_table, rotary_cos, rotary_sin, alibi_slopes, sink,            \
        cu_seqlens_q, max_seqlen_q, softmax_scale, softcap, window_left, window_right, rotary_interleaved, num_splits, \
        batch_invariant, allow_tf32                                                                                    \
  }
