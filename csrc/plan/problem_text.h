// A problem as text. An operator passes its problem to Python in this form, because flash_ext._plan is another library.
#pragma once

#include <string>

#include "problem.h"

namespace flash_ext::plan {

/// Calls visit(name, &Problem::field, meaning) for every field.
template <class Visit>
void for_each_field(Visit visit) {
  visit("operation", &Problem::operation, "forward, backward, weights, weights_backward, decode");
  visit("device", &Problem::device, "cpu, cuda");
  visit("compute_capability", &Problem::compute_capability, "CUDA: 90 for sm_90");
  visit("own_kernels", &Problem::own_kernels,
        "CUDA: kernels for this very compute capability are there and may be used");
  visit("matrix_units", &Problem::matrix_units, "CPU: products by matrix units (AMX), which take bfloat16");
  visit("num_workers", &Problem::num_workers, "threads of a CPU, SMs of a GPU");
  visit("shared_bytes_per_cta", &Problem::shared_bytes_per_cta,
        "CUDA: shared memory that a CTA can have; 0 = not known");
  visit("shared_bytes_per_sm", &Problem::shared_bytes_per_sm, "CUDA: that of all CTAs of an SM");
  visit("dtype", &Problem::dtype, "of q, k and v: float16, bfloat16, float32, float64");
  visit("batch", &Problem::batch, "");
  visit("heads_q", &Problem::heads_q, "");
  visit("heads_kv", &Problem::heads_kv, "");
  visit("seqlen_q", &Problem::seqlen_q, "packed: a bound on the longest sequence");
  visit("seqlen_k", &Problem::seqlen_k, "the same of k; decode: what a sequence of the cache can hold");
  visit("total_q", &Problem::total_q, "packed: rows of all sequences, else 0");
  visit("total_k", &Problem::total_k, "");
  visit("head_dim", &Problem::head_dim, "of q and k");
  visit("head_dim_v", &Problem::head_dim_v, "");
  visit("softmax_scale", &Problem::softmax_scale, "");
  visit("softcap", &Problem::softcap, "0 = off");
  visit("window_left", &Problem::window_left, "-1 = unlimited");
  visit("window_right", &Problem::window_right, "-1 = unlimited, causal = 0");
  visit("top_left", &Problem::top_left, "");
  visit("dropout_p", &Problem::dropout_p, "");
  visit("allow_tf32", &Problem::allow_tf32, "CUDA, float32: products may be those of TF32");
  visit("broadcast", &Problem::broadcast, "q, k or v has a stride of 0");
  visit("varlen", &Problem::varlen, "lengths come from cu_seqlens or seqused");
  visit("paged", &Problem::paged, "decode: the cache has a block_table");
  visit("page_size", &Problem::page_size, "with paged: rows of a page");
  visit("has_leftpad", &Problem::has_leftpad, "decode: sequences of the cache begin after cache_leftpad rows");
  visit("has_bias", &Problem::has_bias, "");
  visit("bias_dtype", &Problem::bias_dtype, "with has_bias");
  visit("bias_in_chunks", &Problem::bias_in_chunks, "its rows can be copied in 16-byte chunks");
  visit("bias_per_key", &Problem::bias_per_key, "the same for all queries");
  visit("bias_of_all_batches", &Problem::bias_of_all_batches, "the same for all batch entries, but not for all heads");
  visit("has_mask", &Problem::has_mask, "");
  visit("mask_per_key", &Problem::mask_per_key, "the same for all queries");
  visit("has_block_mask", &Problem::has_block_mask, "");
  visit("block_m", &Problem::block_m, "with has_block_mask: queries of a block");
  visit("block_n", &Problem::block_n, "with has_block_mask: keys of a block");
  visit("has_alibi", &Problem::has_alibi, "");
  visit("has_sink", &Problem::has_sink, "");
  visit("wants_max_logit", &Problem::wants_max_logit, "forward: the largest score of each head, too");
  visit("deterministic", &Problem::deterministic, "backward");
  visit("num_splits", &Problem::num_splits, "decode: 0 = the plan decides");
  visit("batch_invariant", &Problem::batch_invariant, "decode: the same bits whatever else is in the batch");
}

/// A line "name value" for each field.
std::string text_of(const Problem& problem);

/// The problem of a text from text_of(); throws std::invalid_argument for any other text.
Problem problem_of(const std::string& text);

}  // namespace flash_ext::plan
