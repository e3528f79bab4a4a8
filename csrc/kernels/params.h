// What the host hands to a kernel: raw pointers, 64-bit strides, plain numbers. No torch, no decisions.
//
// Coordinates: `i` is a query row and `j` a key row *within its sequence*; strides count elements.
// A stride of 0 broadcasts. A null pointer means that the option is absent.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/common/dropout/philox.h"

namespace flash_ext {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

/// Names of the dtypes, for readers and for Python.
constexpr std::pair<const char*, DType> kDTypeNames[] = {{"float16", DType::kFloat16},
                                                         {"bfloat16", DType::kBFloat16},
                                                         {"float32", DType::kFloat32},
                                                         {"float64", DType::kFloat64}};

/// (batch, seqlen, heads, head_dim) or, varlen, (total, heads, head_dim) with batch_stride 0.
/// The last dimension is contiguous. For a paged cache, `batch` is the page and `row` the slot in it.
struct TensorView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

/// The log-sum-exp of each query row, float32 (float64 for float64 inputs):
/// (batch, heads_q, seqlen_q), or (heads_q, total_q) with batch_stride 0 for varlen. Rows are contiguous.
struct LseView {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
};

/// Additive bias or boolean mask over (batch, heads_q, seqlen_q, seqlen_k), any dimension broadcast.
struct ScoreView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;  // of a bias; a mask is bool
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

/// Where each sequence lies. Values are clamped by the kernels to what the tensors hold.
struct SequenceParams {
  const int32_t* cu_seqlens_q = nullptr;     // (batch + 1)
  const int32_t* cu_seqlens_k = nullptr;     // (batch + 1)
  const int32_t* seqused_q = nullptr;        // (batch): rows of q in use, counted from the sequence's start
  const int32_t* seqused_k = nullptr;        // (batch): rows of k in use (cache: length, leftpad included)
  const int32_t* leftpad_k = nullptr;        // (batch): rows to skip at the start; key j is row leftpad + j
  const int32_t* cache_batch_idx = nullptr;  // (batch): which cache row belongs to a batch entry
  const int32_t* block_table = nullptr;      // (batch, max_pages): page of each page_size keys
  int64_t block_table_stride = 0;
  int64_t max_pages = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  int64_t cache_batch = 0;  // batch entries of a contiguous cache (bounds cache_batch_idx)
};

/// Key j is visible to query i when  i + offset - left <= j <= i + offset + right;
/// offset is seqlen_k - seqlen_q of the sequence, or 0 when aligned top-left. Negative = unlimited.
struct WindowParams {
  int64_t left = -1;
  int64_t right = -1;
  bool top_left = false;
};

/// Block-sparse visibility, a CSR list of key blocks for each block of query rows; ANDed with all else.
struct BlockMaskParams {
  const int32_t* offsets = nullptr;     // (batch|1, heads_q|1, num_row_blocks + 1), into indices
  const int32_t* indices = nullptr;     // (num_blocks): key block, ascending within a row
  const int32_t* bitmap_ids = nullptr;  // (num_blocks): -1 = every pair visible, else a bitmap
  const int32_t* bitmaps = nullptr;     // (num_bitmaps, block_m, block_n / 32): bit b of word w is key 32 w + b
  int64_t offsets_batch_stride = 0;
  int64_t offsets_head_stride = 0;
  int64_t num_row_blocks = 0;
  int64_t num_blocks = 0;
  int64_t num_bitmaps = 0;
  int64_t block_m = 0;
  int64_t block_n = 0;
};

struct DropoutParams {
  const int64_t* rng = nullptr;  // (2): Philox seed and offset
  DropoutRule rule;
};

/// Everything that turns q and k into scores. Shared by all operations.
struct AttentionParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;    // divides heads_q
  int64_t head_dim = 0;    // of q and k
  int64_t head_dim_v = 0;  // of v and out
  int64_t seqlen_q = 0;    // dense: rows of q; varlen: the most that a sequence can have, at most total_q
  int64_t seqlen_k = 0;    // the same of k; a cache: the rows that a sequence can hold
  int64_t total_q = 0;     // rows of q in memory (dense: seqlen_q of each batch entry)
  int64_t total_k = 0;

  TensorView q;
  TensorView k;
  TensorView v;

  double softmax_scale = 1.0;
  double softcap = 0.0;                 // 0 = off, else s = softcap * tanh(s / softcap)
  const float* alibi_slopes = nullptr;  // (heads_q) or (batch, heads_q): s -= slope * |i + offset - j|
  int64_t alibi_batch_stride = 0;
  ScoreView bias;
  ScoreView mask;              // bool, true = visible
  const void* sink = nullptr;  // (heads_q), accumulate type: adds exp(sink) to the denominator

  SequenceParams seq;
  WindowParams window;
  BlockMaskParams blocks;
  DropoutParams dropout;
  bool allow_tf32 = false;  // CUDA, float32: products may be those of TF32

  // The plan's choice.
  int64_t block_m = 0;     // rows of a query tile
  int64_t head_group = 1;  // heads with the same key head whose rows share a tile: row = i * head_group + head
};

/// What attention_weights does with a dropped weight; kDropoutApply alone scales kept ones, by DropoutRule::keep_scale.
enum DropoutMode : int { kDropoutIgnore = 0, kDropoutApply = 1, kDropoutNegate = 2 };

struct ForwardParams : AttentionParams {
  TensorView out;  // same dtype as q
  LseView lse;
  void* max_logit = nullptr;  // (batch, heads_q), accumulate type, -inf beforehand: the largest visible score; or null
  int64_t num_splits = 1;     // > 1: keys are split into this many ranges whose partial results are merged
  int64_t split_size = 0;     // > 0: ranges of exactly this many keys instead (batch-invariant decoding)
};

/// weights = exp(score - lse) for an lse that is given, after dropout by dropout_mode.
struct WeightsParams : AttentionParams {
  LseView lse;
  ScoreView weights;  // (batch, heads_q, seqlen_q, seqlen_k), varlen: (.., max_seqlen_q, max_seqlen_k), zero beforehand
  int dropout_mode = kDropoutIgnore;
};

/// How CTAs of the backward on CUDA acquire tiles of keys, and share them: see common/backward/order.h.
struct KeyTileSchedule {
  int64_t section_heads = 1;  // key heads, of all batch entries, whose tiles stand side by side
  int64_t head_splits = 1;    // splits of a tile along the query heads of its group; divides them
  int64_t query_splits = 1;   // splits of each head split along the query tiles; at most
  int64_t unsplit_tiles = 0;  // so many tiles, the first in the order, are not split
};

struct BackwardParams : AttentionParams {
  TensorView out;  // null where the forward is attention_weights (see grad_weights)
  LseView lse;
  TensorView grad_out;  // null = zero
  LseView grad_lse;     // null = zero
  /// Gradient of the (dropped, scaled) attention weights themselves, (batch, heads_q, seqlen_q, seqlen_k).
  /// With it, lse is an independent input: no row-sum term, and dlse is written instead.
  ScoreView grad_weights;
  int dropout_mode = kDropoutApply;  // of attention_weights; otherwise kDropoutApply

  // Null = not requested. Dense gradients are contiguous and have their input's dtype.
  TensorView dq;
  TensorView dk;
  TensorView dv;
  ScoreView dbias;        // strides 0 where bias is broadcast: those dimensions are summed; varlen: zero beforehand
  void* dsink = nullptr;  // (heads_q), accumulate type
  LseView dlse;           // only with grad_weights
  bool deterministic = false;  // for devices where the fastest order of sums varies; a CPU always is
  int64_t num_chunks = 1;      // key ranges per head that are worked on independently
  KeyTileSchedule schedule;    // the plan's choice
};

/// Partial results over disjoint keys and what they merge to. Varlen counts as one batch entry of total rows.
struct MergeParams {
  DType dtype = DType::kFloat32;  // of outs and out; lses and lse have its accumulate type
  int64_t splits = 0;
  int64_t batch = 0;
  int64_t seqlen = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  TensorView outs;  // (splits, batch, seqlen, heads, head_dim)
  int64_t outs_split_stride = 0;
  LseView lses;  // (splits, batch, heads, seqlen)
  int64_t lses_split_stride = 0;
  TensorView out;  // (batch, seqlen, heads, head_dim)
  LseView lse;     // (batch, heads, seqlen)
};

struct MergeBackwardParams : MergeParams {
  TensorView grad_out;   // null = zero
  LseView grad_lse;      // null = zero
  TensorView grad_outs;  // like outs
  int64_t grad_outs_split_stride = 0;
  LseView grad_lses;  // like lses
  int64_t grad_lses_split_stride = 0;
};

/// New keys and values, which are appended to those of a cache, with rotary embedding of the keys and of q.
struct AppendParams {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t seqlen_q = 0;  // as in AttentionParams
  int64_t total_q = 0;
  int64_t seqlen_new = 0;    // rows of k and v
  int64_t seqlen_cache = 0;  // rows that a sequence of the cache can hold
  TensorView k;              // (batch, seqlen_new, heads_kv, head_dim)
  TensorView v;              // (batch, seqlen_new, heads_kv, head_dim_v)
  TensorView k_cache;        // contiguous or paged, as in AttentionParams
  TensorView v_cache;
  TensorView q;
  TensorView q_rotated;       // like q; null without rotary embedding
  const void* cos = nullptr;  // (rotary_rows, rotary_dim / 2), q's dtype
  const void* sin = nullptr;  // like cos
  int64_t cos_row_stride = 0;
  int64_t sin_row_stride = 0;
  int64_t rotary_rows = 0;
  int64_t rotary_dim = 0;
  bool rotary_interleaved = false;     // pairs (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2)
  bool rotate_q_by_position = false;   // query t turns by cached length + t instead of by the cached length
  SequenceParams seq;                  // seqused_k: rows in use before the call
  int32_t* seqused_k_after = nullptr;  // (batch): written, rows in use after the call
};

/// out = layer norm of x + residual; rows are contiguous and follow each other.
struct AddLayerNormParams {
  DType dtype = DType::kFloat32;  // of all tensors
  int64_t rows = 0;
  int64_t width = 0;
  const void* x = nullptr;         // (rows, width)
  const void* residual = nullptr;  // (rows, width)
  const void* weight = nullptr;    // (width), null = 1
  const void* bias = nullptr;      // (width), null = 0
  double eps = 0.0;
  void* sum = nullptr;  // (rows, width), x + residual; null = not wanted
  void* out = nullptr;  // (rows, width)
};

struct DropoutMaskParams {
  DropoutParams dropout;
  int64_t batch = 0;
  int64_t heads_q = 0;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  bool* keep = nullptr;  // (batch, heads_q, seqlen_q, seqlen_k), contiguous
};

}  // namespace flash_ext
