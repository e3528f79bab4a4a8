// Every operator of the library. Implementations register themselves per device, in the other files of this folder.
//
// Shapes: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v likewise with its own
// head_dim; varlen drops the batch dimension and brings cu_seqlens. All operators but `*_append` are functional.
// A gradient that is not asked for comes back as an empty tensor of shape (0). allow_tf32 lets products of float32 on
// CUDA be those of TF32: operators cannot see torch's own setting.
#include <torch/csrc/stable/library.h>

#define SCORE_TENSORS                                                                               \
  "Tensor? bias, Tensor? sink, Tensor? mask, Tensor? alibi_slopes, "                                \
  "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "              \
  "Tensor? block_offsets, Tensor? block_indices, Tensor? block_bitmap_ids, Tensor? block_bitmaps, " \
  "Tensor? rng_state, "
#define SCORE_SCALARS                                                                               \
  "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, float softcap, int window_left, " \
  "int window_right, bool top_left, float dropout_p, bool allow_tf32"
#define DECODE_TENSORS                                                                           \
  "Tensor? cache_seqlens, Tensor? cache_leftpad, Tensor? cache_batch_idx, Tensor? block_table, " \
  "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? alibi_slopes, Tensor? sink, Tensor? cu_seqlens_q, "
#define DECODE_SCALARS                                                                           \
  "SymInt max_seqlen_q, float softmax_scale, float softcap, int window_left, int window_right, " \
  "bool rotary_interleaved, int num_splits, bool batch_invariant, bool allow_tf32"

STABLE_TORCH_LIBRARY(flash_ext, m) {
  // deterministic is for the backward that autograd will run; the forward always is.
  m.def("attention_forward(Tensor q, Tensor k, Tensor v, " SCORE_TENSORS SCORE_SCALARS
        ", bool deterministic=False) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, " SCORE_TENSORS SCORE_SCALARS
      ", bool deterministic, bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dsink)"
      " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)");

  // The probabilities exp(score - lse), (batch, heads_q, seqlen_q, seqlen_k), in q's dtype. dropout_mode: 0 ignores
  // dropout, 1 zeroes what is dropped and scales the rest by 1 / (1 - p), 2 negates what is dropped and scales nothing.
  m.def("attention_weights(Tensor q, Tensor k, Tensor lse, " SCORE_TENSORS SCORE_SCALARS
        ", int dropout_mode) -> Tensor");
  m.def("attention_weights_backward(Tensor grad_weights, Tensor q, Tensor k, Tensor lse, " SCORE_TENSORS SCORE_SCALARS
        ", int dropout_mode, bool need_dq, bool need_dk, bool need_dlse, bool need_dbias)"
        " -> (Tensor dq, Tensor dk, Tensor dlse, Tensor dbias)");

  m.def("attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, " DECODE_TENSORS DECODE_SCALARS
        ") -> (Tensor out, Tensor lse)");
  m.def(
      "attention_decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor "
      "v, " DECODE_TENSORS DECODE_SCALARS ") -> (Tensor out, Tensor lse)");

  // Raise what attention_forward and attention_decode would raise of these arguments, and compute nothing.
  m.def("attention_check(Tensor q, Tensor k, Tensor v, " SCORE_TENSORS SCORE_SCALARS ") -> ()");
  m.def("attention_decode_check(Tensor q, Tensor k_cache, Tensor v_cache, " DECODE_TENSORS DECODE_SCALARS ") -> ()");

  // outs (splits, batch, seqlen_q, heads_q, head_dim) and lses (splits, batch, heads_q, seqlen_q), or varlen without
  // batch.
  m.def("merge(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)");
  m.def(
      "merge_backward(Tensor? grad_out, Tensor? grad_lse, Tensor outs, Tensor lses, Tensor out, Tensor lse)"
      " -> (Tensor grad_outs, Tensor grad_lses)");

  // Which scores dropout keeps, bool (batch, heads_q, seqlen_q, seqlen_k), on rng's device.
  m.def(
      "dropout_mask(Tensor rng, float dropout_p, SymInt batch, SymInt heads_q, SymInt seqlen_q, SymInt seqlen_k)"
      " -> Tensor");
}
