// Every operator of the library. Implementations register themselves per device, in the other files of this folder.
//
// Shapes: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v likewise with its own
// head_dim; varlen drops the batch dimension and brings cu_seqlens. All operators but `*_append` are functional.
// A gradient that is not asked for comes back as an empty tensor of shape (0). allow_tf32 lets products of float32 on
// CUDA be those of TF32: operators cannot see torch's own setting.
#include <torch/csrc/stable/library.h>

#include "option_lists.h"

#define SCHEMA_FLOAT "float "
#define SCHEMA_INT "int "
#define SCHEMA_SYMINT "SymInt "
#define SCHEMA_BOOL "bool "
#define SCHEMA_TENSOR "Tensor? "
#define FIRST_IN_SCHEMA(KIND, name, value) SCHEMA_##KIND #name
#define IN_SCHEMA(KIND, name, value) ", " SCHEMA_##KIND #name "=" #value
#define SCORE_OPTIONS FLASH_EXT_SCORE_OPTION_LIST(FIRST_IN_SCHEMA, IN_SCHEMA)
#define DECODE_OPTIONS FLASH_EXT_DECODE_OPTION_LIST(FIRST_IN_SCHEMA, IN_SCHEMA)

STABLE_TORCH_LIBRARY(flash_ext, m) {
  // deterministic is for the backward that autograd will run; the forward always is.
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " SCORE_OPTIONS
        ", bool deterministic=False) -> (Tensor out, Tensor lse)");
  // The same with max_logit (batch, heads_q), the largest score that a query of the head sees. Its derivative is that
  // of attention_forward; max_logit has none.
  m.def("attention_forward_max_logit(Tensor q, Tensor k, Tensor v, " SCORE_OPTIONS
        ", bool deterministic=False) -> (Tensor out, Tensor lse, Tensor max_logit)");
  // attention_forward with the rest of its options left at their defaults: a call takes 4 us less. Its derivative is
  // that of attention_forward.
  m.def(
      "attention_forward_plain(Tensor q, Tensor k, Tensor v, float softmax_scale, int window_left, int window_right, "
      "bool top_left) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, bool deterministic, bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool "
      "need_dsink, " SCORE_OPTIONS ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)");

  // The probabilities exp(score - lse), (batch, heads_q, seqlen_q, seqlen_k), in q's dtype. dropout_mode: 0 ignores
  // dropout, 1 zeroes dropped weights and scales the others by 1 / (1 - p), 2 negates dropped weights and scales
  // nothing.
  m.def("attention_weights(Tensor q, Tensor k, Tensor lse, int dropout_mode, " SCORE_OPTIONS ") -> Tensor");
  m.def(
      "attention_weights_backward(Tensor grad_weights, Tensor q, Tensor k, Tensor lse, int dropout_mode, bool need_dq, "
      "bool need_dk, bool need_dlse, bool need_dbias, " SCORE_OPTIONS
      ") -> (Tensor dq, Tensor dk, Tensor dlse, Tensor dbias)");

  m.def("attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, " DECODE_OPTIONS ") -> (Tensor out, Tensor lse)");
  m.def(
      "attention_decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor "
      "v, " DECODE_OPTIONS ") -> (Tensor out, Tensor lse)");

  // The plan::Problem of a call, as the planner's text (plan/problem_text.h): v is None for the attention weights.
  m.def(
      "attention_describe(Tensor q, Tensor k, Tensor? v, str operation, bool deterministic, bool "
      "wants_max_logit, " SCORE_OPTIONS ") -> str");
  m.def("attention_decode_describe(Tensor q, Tensor k_cache, Tensor v_cache, " DECODE_OPTIONS ") -> str");

  // Raise the errors that attention_forward and attention_decode would raise for these arguments, and compute nothing.
  m.def("attention_check(Tensor q, Tensor k, Tensor v, " SCORE_OPTIONS ") -> ()");
  m.def("attention_decode_check(Tensor q, Tensor k_cache, Tensor v_cache, " DECODE_OPTIONS ") -> ()");

  // outs (splits, batch, seqlen_q, heads_q, head_dim) and lses (splits, batch, heads_q, seqlen_q), or varlen without
  // batch.
  m.def("merge(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
  m.def(
      "merge_backward(Tensor? grad_out, Tensor? grad_lse, Tensor outs, Tensor lses, Tensor out, Tensor lse)"
      " -> (Tensor grad_outs, Tensor grad_lses)");

  // sum = x + residual and out = layer_norm(sum), (..., width), without a derivative; weight and bias (width). A sum
  // that is not needed is an empty tensor of shape (0).
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, bool need_sum)"
      " -> (Tensor sum, Tensor out)");

  // Which scores dropout keeps, bool (batch, heads_q, seqlen_q, seqlen_k), on rng's device.
  m.def(
      "dropout_mask(Tensor rng, float dropout_p, SymInt batch, SymInt heads_q, SymInt seqlen_q, SymInt seqlen_k)"
      " -> Tensor");

  // The lists of a block mask. Query i, at position i + offset, sees the keys of a window around it, changed by `rule`:
  // "window", bounds (0): all queries also see num_global tokens at the start, which see all keys unless causal;
  // "documents", bounds (documents + 1), where documents begin and the last one ends: only keys of the same document;
  // "prefix", bounds (batch): also so many first keys; "spans", bounds (batch, spans, 2): also the keys of its span,
  // from where the window begins. bounds are int32 or int64. There is room for max_blocks blocks and, in each row of
  // blocks, max_bitmaps bitmaps; entries past the last block are 0.
  m.def(
      "interval_block_lists(Tensor bounds, str rule, SymInt seqlen_q, SymInt seqlen_k, SymInt block_m, SymInt block_n, "
      "SymInt offset, SymInt window_left, SymInt window_right, SymInt num_global, bool causal, SymInt max_blocks, "
      "SymInt max_bitmaps) -> (Tensor offsets, Tensor indices, Tensor bitmap_ids, Tensor bitmaps)");
  // The tensors of a block mask with queries and keys exchanged. The given mask has `columns` columns of blocks; the
  // result has room for max_blocks.
  m.def(
      "block_lists_transposed(Tensor offsets, Tensor indices, Tensor bitmap_ids, Tensor bitmaps, SymInt columns, "
      "SymInt max_blocks) -> (Tensor offsets, Tensor indices, Tensor bitmap_ids, Tensor bitmaps)");

  // Sets whether CUDA calls run kernels for exactly their GPU's compute capability, where there are any, or the kernels
  // for all GPUs. Returns the previous setting. For tests and measurements.
  m.def("use_own_kernels(bool on) -> bool");

  // These let the kernels of aten_overrides.h compute aten's operators, for a dispatch key and until they are restored.
  // Each library has its own kernels.
  m.def("override_aten_by_cpu(str op, str dispatch_key) -> ()");
  m.def("override_aten_by_cuda(str op, str dispatch_key) -> ()");
  m.def("restore_aten_by_cpu() -> ()");
  m.def("restore_aten_by_cuda() -> ()");
  m.def("fill_fused_attention_by_cpu(str dispatch_key) -> ()");
  m.def("fill_fused_attention_by_cuda(str dispatch_key) -> ()");
  m.def("aten_calls_by_cpu(str op) -> int");
  m.def("aten_calls_by_cuda(str op) -> int");
}
