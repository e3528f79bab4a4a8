// The options that operators share, each listed once. These lists generate the schemas, parameters and structs; the
// tuples of flash_ext/ops.py follow from the schemas.
//
// An entry is OPTION(KIND, name, default), with the default as a schema writes it. FIRST is the entry without a default
// and without a comma before it. Options are ordered by how often callers set them: torch takes a quarter of a
// microsecond and more to pass an argument, so callers omit trailing options that have their defaults.
#pragma once

#define FLASH_EXT_SCORE_OPTION_LIST(FIRST, OPTION) \
  FIRST(FLOAT, softmax_scale, )                    \
  OPTION(INT, window_left, -1)                     \
  OPTION(INT, window_right, -1)                    \
  OPTION(BOOL, top_left, False)                    \
  OPTION(TENSOR, cu_seqlens_q, None)               \
  OPTION(TENSOR, cu_seqlens_k, None)               \
  OPTION(SYMINT, max_seqlen_q, 0)                  \
  OPTION(SYMINT, max_seqlen_k, 0)                  \
  OPTION(TENSOR, bias, None)                       \
  OPTION(TENSOR, mask, None)                       \
  OPTION(FLOAT, softcap, 0.0)                      \
  OPTION(TENSOR, sink, None)                       \
  OPTION(TENSOR, alibi_slopes, None)               \
  OPTION(FLOAT, dropout_p, 0.0)                    \
  OPTION(TENSOR, rng_state, None)                  \
  OPTION(TENSOR, seqused_q, None)                  \
  OPTION(TENSOR, seqused_k, None)                  \
  OPTION(TENSOR, block_offsets, None)              \
  OPTION(TENSOR, block_indices, None)              \
  OPTION(TENSOR, block_bitmap_ids, None)           \
  OPTION(TENSOR, block_bitmaps, None)              \
  OPTION(BOOL, allow_tf32, False)

#define FLASH_EXT_DECODE_OPTION_LIST(FIRST, OPTION) \
  FIRST(FLOAT, softmax_scale, )                     \
  OPTION(INT, window_left, -1)                      \
  OPTION(INT, window_right, -1)                     \
  OPTION(TENSOR, cache_seqlens, None)               \
  OPTION(TENSOR, block_table, None)                 \
  OPTION(TENSOR, cache_batch_idx, None)             \
  OPTION(TENSOR, rotary_cos, None)                  \
  OPTION(TENSOR, rotary_sin, None)                  \
  OPTION(BOOL, rotary_interleaved, False)           \
  OPTION(TENSOR, cu_seqlens_q, None)                \
  OPTION(SYMINT, max_seqlen_q, 0)                   \
  OPTION(FLOAT, softcap, 0.0)                       \
  OPTION(TENSOR, sink, None)                        \
  OPTION(TENSOR, alibi_slopes, None)                \
  OPTION(TENSOR, cache_leftpad, None)               \
  OPTION(INT, num_splits, 0)                        \
  OPTION(BOOL, batch_invariant, False)              \
  OPTION(BOOL, allow_tf32, False)

// Members of a struct, with the same defaults.
#define FLASH_EXT_MEMBER_FLOAT(name, value) double name = value;
#define FLASH_EXT_MEMBER_INT(name, value) int64_t name = value;
#define FLASH_EXT_MEMBER_SYMINT(name, value) int64_t name = value;
#define FLASH_EXT_MEMBER_BOOL(name, value) bool name = false;
#define FLASH_EXT_MEMBER_TENSOR(name, value) OptionalTensor name;
#define FLASH_EXT_FIRST_MEMBER(KIND, name, value) FLASH_EXT_MEMBER_##KIND(name, 1.0)
#define FLASH_EXT_MEMBER(KIND, name, value) FLASH_EXT_MEMBER_##KIND(name, value)
