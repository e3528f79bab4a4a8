// Kernels with the schemas of aten's fused attention operators, for calls that become calls of ours by views alone
// (flash_ext/integrations/aten_attention.py serves all calls). Each returns the same as torch's own kernel: shapes,
// dtypes, memory order and the form of the log-sum-exp; and no gradients if out has no gradient. For a call that it
// does not serve it returns nothing, and the caller goes on to Python. An undefined tensor is torch's None in C++.
#pragma once

#include <tuple>

#include "checks.h"

namespace flash_ext::api {

// Tensors2 holds out and lse, Tensors3 the gradients of q, k and v.

/// out, lse, two tensors of offsets, two lengths, two tensors of random numbers, debug mask.
using FlashResults = std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t, Tensor, Tensor, Tensor>;

std::optional<FlashResults> flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                          bool is_causal, bool return_debug_mask, const std::optional<double>& scale);

std::optional<Tensors3> flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                       const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                       const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q, int64_t max_k,
                                       double dropout_p, bool is_causal, const Tensor& philox_seed,
                                       const Tensor& philox_offset, const std::optional<double>& scale);

std::optional<Tensors2> cpu_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                    bool is_causal, const OptionalTensor& attn_mask,
                                    const std::optional<double>& scale);

std::optional<Tensors3> cpu_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const Tensor& out, const Tensor& logsumexp, double dropout_p,
                                     bool is_causal, const OptionalTensor& attn_mask,
                                     const std::optional<double>& scale);

std::optional<Tensors4> efficient_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool compute_log_sumexp, double dropout_p,
                                          bool is_causal, const std::optional<double>& scale);

/// A gradient of the bias is left to Python.
std::optional<Tensors4> efficient_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                           const Tensor& value, const Tensor& attn_bias, const Tensor& out,
                                           const Tensor& logsumexp, const Tensor& philox_seed,
                                           const Tensor& philox_offset, double dropout_p,
                                           const std::vector<int64_t>& grad_input_mask, bool is_causal,
                                           const std::optional<double>& scale);

std::optional<FlashResults> cudnn_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool compute_log_sumexp, double dropout_p,
                                          bool is_causal, bool return_debug_mask, const std::optional<double>& scale);

std::optional<Tensors3> cudnn_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                       const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                       const Tensor& philox_seed, const Tensor& philox_offset, const Tensor& attn_bias,
                                       const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q, int64_t max_k,
                                       double dropout_p, bool is_causal, const std::optional<double>& scale);

/// The operator that torch keeps for other libraries to fill, and never calls on these devices by itself. Unlike the
/// others it takes boolean masks, biases that broadcast, their gradient and dropout, whose state is `philox_seed`.
/// Raises for a call that would take copies.
FlashResults fused_forward(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_bias,
                           double dropout_p, bool is_causal, bool return_debug_mask,
                           const std::optional<double>& scale);

/// A gradient that was not asked for is undefined.
Tensors4 fused_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& attn_bias, const std::vector<int64_t>& grad_input_mask, const Tensor& out,
                        const Tensor& logsumexp, const Tensor& cum_seq_q, const Tensor& cum_seq_k, int64_t max_q,
                        int64_t max_k, double dropout_p, bool is_causal, const Tensor& philox_seed,
                        const Tensor& philox_offset, const std::optional<double>& scale);

}  // namespace flash_ext::api
