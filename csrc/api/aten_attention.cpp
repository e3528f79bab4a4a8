#include "aten_attention.h"

#include <limits>

#include "aten_calls.h"

namespace flash_ext::api {
namespace {

constexpr int64_t kEfficientLseMultiple = 32;  // torch pads the rows of its log-sum-exp up to this

bool has_known_order(const AtenCall& call) {
  return !has_zero_stride(call.q) && !has_zero_stride(call.k) && !has_zero_stride(call.v);
}

Tensors3 in_order_of_inputs(const Tensors3& gradients, const AtenCall& call) {
  const auto& [dq, dk, dv] = gradients;
  return {in_order_of(dq, call.q), in_order_of(dk, call.k), in_order_of(dv, call.v)};
}

/// Gives an lse (batch, heads, seqlen_q) the memory order (batch, seqlen_q, heads).
Tensor heads_innermost(const Tensor& lse) {
  const int64_t heads = lse.size(1), seqlen = lse.size(2);
  if (heads == 1 || seqlen == 1) return lse;
  Tensor other = new_empty_strided(lse, shape_of(lse), {seqlen * heads, 1, heads}, lse.scalar_type());
  return torch::stable::copy_(other, lse);
}

/// Pads the rows of an lse (batch, heads, seqlen_q) to a multiple of 32 with infinity.
Tensor padded_lse(const Tensor& lse) {
  const int64_t batch = lse.size(0), heads = lse.size(1), seqlen = lse.size(2);
  const int64_t missing = (kEfficientLseMultiple - seqlen % kEfficientLseMultiple) % kEfficientLseMultiple;
  if (missing == 0) return lse;
  const int64_t length = seqlen + missing;
  const Tensor padded = new_empty(lse, {batch, heads, length}, lse.scalar_type());
  const Shape strides{heads * length, length, 1};
  Tensor rows = with_strides(padded, shape_of(lse), strides);
  torch::stable::copy_(rows, lse);
  torch::stable::fill_(with_strides(padded, {batch, heads, missing}, strides, seqlen),
                       std::numeric_limits<double>::infinity());
  return padded;
}

Tensor scalar(const Tensor& like, ScalarType dtype) { return new_empty(like, {}, dtype); }

}  // namespace

std::optional<FlashResults> flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                          bool is_causal, bool return_debug_mask, const std::optional<double>& scale) {
  const AtenCall call{query, key, value, std::nullopt, dropout_p, is_causal, /*top_left=*/false, scale};
  if (return_debug_mask || !is_served(call) || has_zero_stride(query)) return std::nullopt;
  const auto [out, lse] = attend_arranged(call, arrange(call, std::nullopt), std::nullopt);
  return with_lengths(call, in_order_of(out, query), lse, new_empty(query, {2}, ScalarType::UInt64),
                      scalar(query, ScalarType::UInt64), new_empty(query, {0}, query.scalar_type()));
}

std::optional<Tensors3> flash_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                       const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                       const Tensor& /*cum_seq_q*/, const Tensor& /*cum_seq_k*/, int64_t /*max_q*/,
                                       int64_t /*max_k*/, double dropout_p, bool is_causal,
                                       const Tensor& /*philox_seed*/, const Tensor& /*philox_offset*/,
                                       const std::optional<double>& scale) {
  if (!grad_out.defined()) return Tensors3();
  const AtenCall call{query, key, value, std::nullopt, dropout_p, is_causal, /*top_left=*/false, scale};
  if (!is_served(call) || !has_known_order(call)) return std::nullopt;
  const Arrangement arrangement = arrange(call, std::nullopt);
  if (!belong(call, arrangement, grad_out, out, logsumexp)) return std::nullopt;
  return in_order_of_inputs(all_gradients(call, arrangement, std::nullopt, grad_out, out, logsumexp), call);
}

std::optional<Tensors2> cpu_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                    bool is_causal, const OptionalTensor& attn_mask,
                                    const std::optional<double>& scale) {
  const AtenCall call{query, key, value, attn_mask, dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call) || has_zero_stride(query)) return std::nullopt;
  const OptionalTensor scores = four_dimensions(attn_mask);
  const auto [out, lse] = attend_arranged(call, arrange(call, scores), scores);
  return Tensors2{in_order_of(out, query), heads_innermost(lse)};
}

std::optional<Tensors3> cpu_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const Tensor& out, const Tensor& logsumexp, double dropout_p,
                                     bool is_causal, const OptionalTensor& attn_mask,
                                     const std::optional<double>& scale) {
  if (!grad_out.defined()) return Tensors3();
  const AtenCall call{query, key, value, attn_mask, dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call) || !belong(call, Arrangement::kByRows, grad_out, out, logsumexp)) return std::nullopt;
  return all_gradients(call, Arrangement::kByRows, four_dimensions(attn_mask), grad_out, out, logsumexp);
}

std::optional<Tensors4> efficient_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool compute_log_sumexp, double dropout_p,
                                          bool is_causal, const std::optional<double>& scale) {
  const AtenCall call{query, key, value, attn_bias, dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call)) return std::nullopt;
  const auto [out, lse] = attend_arranged(call, Arrangement::kByRows, four_dimensions(attn_bias));
  const Tensor kept =
      compute_log_sumexp ? padded_lse(lse) : new_empty(query, {query.size(0), query.size(1), 0}, lse.scalar_type());
  return Tensors4{out, kept, scalar(query, ScalarType::Long), scalar(query, ScalarType::Long)};
}

std::optional<Tensors4> efficient_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                           const Tensor& value, const Tensor& attn_bias, const Tensor& out,
                                           const Tensor& logsumexp, const Tensor& /*philox_seed*/,
                                           const Tensor& /*philox_offset*/, double dropout_p,
                                           const std::vector<int64_t>& grad_input_mask, bool is_causal,
                                           const std::optional<double>& scale) {
  if (!grad_out.defined()) return Tensors4();
  const AtenCall call{query, key, value, defined(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
  const bool need_dbias = grad_input_mask.at(3) != 0;
  if (need_dbias || !is_served(call) || !belong(call, Arrangement::kByRows, grad_out, out, logsumexp)) {
    return std::nullopt;
  }
  const int64_t seqlen = query.size(2);
  if (logsumexp.size(2) < seqlen) return std::nullopt;
  const Tensor lse = with_strides(logsumexp, {logsumexp.size(0), logsumexp.size(1), seqlen},
                                  {logsumexp.stride(0), logsumexp.stride(1), logsumexp.stride(2)});
  const auto [dq, dk, dv] = all_gradients(call, Arrangement::kByRows, four_dimensions(call.scores), grad_out, out, lse);
  return Tensors4{dq, dk, dv, Tensor()};
}

std::optional<FlashResults> cudnn_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool /*compute_log_sumexp*/,
                                          double dropout_p, bool is_causal, bool return_debug_mask,
                                          const std::optional<double>& scale) {
  const AtenCall call{query, key, value, attn_bias, dropout_p, is_causal, /*top_left=*/true, scale};
  if (return_debug_mask || !is_served(call) || has_zero_stride(query)) return std::nullopt;
  const OptionalTensor scores = four_dimensions(attn_bias);
  const auto [out, lse] = attend_arranged(call, arrange(call, scores), scores);
  const int64_t batch = query.size(0), heads = query.size(1), seqlen = query.size(2);
  const Tensor column = with_strides(lse, {batch, heads, seqlen, 1}, {heads * seqlen, seqlen, 1, 1});
  return with_lengths(call, in_order_of(out, query), column, scalar(query, ScalarType::Long),
                      scalar(query, ScalarType::Long), Tensor());
}

std::optional<Tensors3> cudnn_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                       const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                       const Tensor& /*philox_seed*/, const Tensor& /*philox_offset*/,
                                       const Tensor& attn_bias, const Tensor& /*cum_seq_q*/,
                                       const Tensor& /*cum_seq_k*/, int64_t /*max_q*/, int64_t /*max_k*/,
                                       double dropout_p, bool is_causal, const std::optional<double>& scale) {
  if (!grad_out.defined()) return Tensors3();
  const AtenCall call{query, key, value, defined(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call) || !has_known_order(call) || !logsumexp.is_contiguous()) return std::nullopt;
  const int64_t batch = query.size(0), heads = query.size(1), seqlen = query.size(2);
  if (logsumexp.numel() != batch * heads * seqlen) return std::nullopt;
  const Tensor lse = with_strides(logsumexp, {batch, heads, seqlen}, {heads * seqlen, seqlen, 1});
  const OptionalTensor scores = four_dimensions(call.scores);
  const Arrangement arrangement = arrange(call, scores);
  if (!belong(call, arrangement, grad_out, out, lse)) return std::nullopt;
  return in_order_of_inputs(all_gradients(call, arrangement, scores, grad_out, out, lse), call);
}

}  // namespace flash_ext::api
