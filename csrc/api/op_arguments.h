// The parameter lists that operators share, as functions take them and as structs hold them. They mirror the macros
// of ops.cpp word for word: TORCH_BOX needs functions with one parameter per operator argument.
#pragma once

#include "decode.h"
#include "score_options.h"

#define FLASH_EXT_SCORE_PARAMETERS                                                                                    \
  double softmax_scale, int64_t window_left, int64_t window_right, bool top_left, const OptionalTensor &cu_seqlens_q, \
      const OptionalTensor &cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const OptionalTensor &bias,     \
      const OptionalTensor &mask, double softcap, const OptionalTensor &sink, const OptionalTensor &alibi_slopes,     \
      double dropout_p, const OptionalTensor &rng_state, const OptionalTensor &seqused_q,                             \
      const OptionalTensor &seqused_k, const OptionalTensor &block_offsets, const OptionalTensor &block_indices,      \
      const OptionalTensor &block_bitmap_ids, const OptionalTensor &block_bitmaps, bool allow_tf32

#define FLASH_EXT_SCORE_OPTIONS                                                                                       \
  ScoreOptions {                                                                                                      \
    softmax_scale, window_left, window_right, top_left, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, bias, \
        mask, softcap, sink, alibi_slopes, dropout_p, rng_state, seqused_q, seqused_k, block_offsets, block_indices,  \
        block_bitmap_ids, block_bitmaps, allow_tf32                                                                   \
  }

#define FLASH_EXT_DECODE_PARAMETERS                                                                               \
  double softmax_scale, int64_t window_left, int64_t window_right, const OptionalTensor &cache_seqlens,           \
      const OptionalTensor &block_table, const OptionalTensor &cache_batch_idx, const OptionalTensor &rotary_cos, \
      const OptionalTensor &rotary_sin, bool rotary_interleaved, const OptionalTensor &cu_seqlens_q,              \
      int64_t max_seqlen_q, double softcap, const OptionalTensor &sink, const OptionalTensor &alibi_slopes,       \
      const OptionalTensor &cache_leftpad, int64_t num_splits, bool batch_invariant, bool allow_tf32

#define FLASH_EXT_DECODE_OPTIONS                                                                                   \
  DecodeOptions {                                                                                                  \
    softmax_scale, window_left, window_right, cache_seqlens, block_table, cache_batch_idx, rotary_cos, rotary_sin, \
        rotary_interleaved, cu_seqlens_q, max_seqlen_q, softcap, sink, alibi_slopes, cache_leftpad, num_splits,    \
        batch_invariant, allow_tf32                                                                                \
  }
