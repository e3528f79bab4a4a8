#include "aten_attention.h"

#include <array>
#include <cmath>
#include <limits>

#include "aten_layouts.h"
#include "attention.h"
#include "plan/plan.h"

namespace flash_ext::api {
namespace {

constexpr int64_t kHeadDimMultiple = 8, kMaxHeadDim = 256;
constexpr int64_t kEfficientLseMultiple = 32;  // torch pads the rows of its log-sum-exp up to this

// ---- What is for us -------------------------------------------------------------------------------------------------

/// (batch, heads, seqlen, head_dim) tensors and their options.
struct Call {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  OptionalTensor scores;  // bool: a mask, else a bias
  double dropout_p;
  bool causal;
  bool top_left;
  std::optional<double> scale;
  OptionalTensor rng_state = std::nullopt;
};

bool rows_are_dense(const Tensor& x) { return x.dim() == 4 && x.stride(3) == 1; }

bool has_head_dim(const Tensor& x) {
  return x.size(3) >= 1 && x.size(3) <= kMaxHeadDim && x.size(3) % kHeadDimMultiple == 0;
}

/// torch computes with Inf and NaN, too.
bool takes_scale(const std::optional<double>& scale) {
  return !scale || std::abs(*scale) <= static_cast<double>(std::numeric_limits<float>::max());
}

bool exceeds_sizes(const Tensor& q, const Tensor& k) {
  return q.is_cuda() &&
         (q.size(0) > plan::kMaxCudaBatch || q.size(2) > plan::kMaxCudaSeqlenQ || k.size(2) > plan::kMaxCudaSeqlenK);
}

bool has_kernels(const Tensor& q) {
  const std::optional<DType> dtype = kernel_dtype(q.scalar_type());
  if (!dtype) return false;
  plan::Problem problem;
  describe_device(q, problem);
  problem.dtype = *dtype;
  return plan::supports(problem).ok;
}

/// Whether torch's kernels would take this bias beside this query.
bool may_add(const OptionalTensor& bias, const Tensor& q) {
  if (!bias) return true;
  const ScalarType dtype = bias->scalar_type();
  return (bias->dim() == 2 || bias->dim() == 4) && (dtype == ScalarType::Float || dtype == q.scalar_type());
}

/// Whether our operators take the tensors as they are, but for the scores.
bool fits_operators(const Call& call) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  if (!takes_scale(call.scale)) return false;
  if (!rows_are_dense(q) || !rows_are_dense(k) || !rows_are_dense(v)) return false;
  if (q.size(0) != k.size(0) || q.size(0) != v.size(0)) return false;
  const int64_t heads = k.size(1);
  if (heads == 0 || heads != v.size(1) || q.size(1) % heads != 0) return false;
  if (k.size(2) != v.size(2) || q.size(3) != k.size(3) || !has_head_dim(q) || !has_head_dim(v)) return false;
  if (q.scalar_type() != k.scalar_type() || q.scalar_type() != v.scalar_type()) return false;
  return !exceeds_sizes(q, k) && has_kernels(q);
}

bool is_served(const Call& call) { return call.dropout_p == 0 && may_add(call.scores, call.q) && fits_operators(call); }

OptionalTensor defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

// ---- Calling our operators ------------------------------------------------------------------------------------------

/// With ones in front, so that it has four dimensions.
OptionalTensor four_dimensions(const OptionalTensor& scores) {
  if (!scores || scores->dim() == 4) return scores;
  Shape sizes = shape_of(*scores), strides(scores->strides().begin(), scores->strides().end());
  const int64_t missing = 4 - scores->dim();
  const int64_t whole = sizes.front() * strides.front();
  sizes.insert(sizes.begin(), missing, 1);
  strides.insert(strides.begin(), missing, whole);
  return with_strides(*scores, sizes, strides);
}

ScoreOptions options_of(const Call& call, Arrangement arrangement, const OptionalTensor& scores, bool allow_tf32) {
  ScoreOptions options;
  options.softmax_scale = call.scale ? *call.scale : 1.0 / std::sqrt(static_cast<double>(call.q.size(3)));
  options.window_right = call.causal ? 0 : -1;
  options.top_left = call.top_left;
  if (scores) {
    const bool is_mask = scores->scalar_type() == ScalarType::Bool;
    (is_mask ? options.mask : options.bias) = to_scores(arrangement, *scores);
  }
  options.dropout_p = call.dropout_p;
  options.rng_state = call.rng_state;
  options.allow_tf32 = allow_tf32;
  return options;
}

/// The arrangement whose results have the query's memory order, or by rows.
Arrangement arrange(const Call& call, const OptionalTensor& scores) {
  return arrangement_of(call.q, call.k, call.v, scores);
}

/// out and lse (batch, heads, seqlen_q).
Tensors2 attend_arranged(const Call& call, Arrangement arrangement, const OptionalTensor& scores) {
  const auto rows = [&](const Tensor& x) { return to_rows(arrangement, x); };
  const ScoreOptions options = options_of(call, arrangement, scores, torch_settings(call.q, false).allow_tf32);
  const ForwardCall done = attend(rows(call.q), rows(call.k), rows(call.v), options);
  const int64_t batch = call.q.size(0), heads = call.q.size(1), seqlen = call.q.size(2);
  const Tensor out = from_rows(arrangement, done.out, batch, heads);
  if (arrangement == Arrangement::kByRows) return {out, done.lse};
  return {out, with_strides(done.lse, {batch, heads, seqlen}, {heads * seqlen, seqlen, 1})};
}

/// Whether these are the results of such a call, and can be arranged like its inputs without a copy.
bool belong(const Call& call, Arrangement arrangement, const Tensor& grad_out, const Tensor& out, const Tensor& lse) {
  for (const Tensor* rows : {&grad_out, &out}) {
    if (!rows_are_dense(*rows) || !fits(arrangement, *rows)) return false;
  }
  return lse.dim() == 3 && fits(arrangement, lse);
}

BackwardCall differentiate_arranged(const Call& call, Arrangement arrangement, const OptionalTensor& scores,
                                    const Tensor& grad_out, const Tensor& out, const Tensor& lse,
                                    const Needed& needed) {
  const auto rows = [&](const Tensor& x) { return to_rows(arrangement, x); };
  const TorchSettings settings = torch_settings(call.q, true);
  const ScoreOptions options = options_of(call, arrangement, scores, settings.allow_tf32);
  return attend_backward(rows(grad_out), std::nullopt, rows(call.q), rows(call.k), rows(call.v), rows(out),
                         to_lse(arrangement, lse), options, settings.deterministic, needed);
}

/// Gradients of q, k and v.
Tensors3 all_gradients(const Call& call, Arrangement arrangement, const OptionalTensor& scores, const Tensor& grad_out,
                       const Tensor& out, const Tensor& lse) {
  const BackwardCall done =
      differentiate_arranged(call, arrangement, scores, grad_out, out, lse, {/*dq=*/true, /*dk=*/true, /*dv=*/true});
  const int64_t batch = call.q.size(0), heads_kv = call.k.size(1);
  return {from_rows(arrangement, *done.dq, batch, call.q.size(1)), from_rows(arrangement, *done.dk, batch, heads_kv),
          from_rows(arrangement, *done.dv, batch, heads_kv)};
}

// ---- Forms of results -----------------------------------------------------------------------------------------------

bool has_known_order(const Call& call) {
  return !has_zero_stride(call.q) && !has_zero_stride(call.k) && !has_zero_stride(call.v);
}

Tensors3 in_order_of_inputs(const Tensors3& gradients, const Call& call) {
  const auto& [dq, dk, dv] = gradients;
  return {in_order_of(dq, call.q), in_order_of(dk, call.k), in_order_of(dv, call.v)};
}

/// (batch, heads, seqlen_q), in memory (batch, seqlen_q, heads).
Tensor heads_innermost(const Tensor& lse) {
  const int64_t heads = lse.size(1), seqlen = lse.size(2);
  if (heads == 1 || seqlen == 1) return lse;
  Tensor other = new_empty_strided(lse, shape_of(lse), {seqlen * heads, 1, heads}, lse.scalar_type());
  return torch::stable::copy_(other, lse);
}

/// (batch, heads, seqlen_q) with rows of a length that is a multiple of 32, infinite behind the end.
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

/// The results but out and lse: torch leaves two tensors for dropout, without dropout too.
FlashResults with_lengths(const Call& call, const Tensor& out, const Tensor& lse, const Tensor& seed,
                          const Tensor& offset, const Tensor& debug_mask) {
  return {out, lse, Tensor(), Tensor(), call.q.size(2), call.k.size(2), seed, offset, debug_mask};
}

}  // namespace

// ---- aten::_scaled_dot_product_flash_attention ----------------------------------------------------------------------

std::optional<FlashResults> flash_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                          bool is_causal, bool return_debug_mask, const std::optional<double>& scale) {
  const Call call{query, key, value, std::nullopt, dropout_p, is_causal, /*top_left=*/false, scale};
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
  const Call call{query, key, value, std::nullopt, dropout_p, is_causal, /*top_left=*/false, scale};
  if (!is_served(call) || !has_known_order(call)) return std::nullopt;
  const Arrangement arrangement = arrange(call, std::nullopt);
  if (!belong(call, arrangement, grad_out, out, logsumexp)) return std::nullopt;
  return in_order_of_inputs(all_gradients(call, arrangement, std::nullopt, grad_out, out, logsumexp), call);
}

// ---- aten::_scaled_dot_product_flash_attention_for_cpu --------------------------------------------------------------

std::optional<Tensors2> cpu_forward(const Tensor& query, const Tensor& key, const Tensor& value, double dropout_p,
                                    bool is_causal, const OptionalTensor& attn_mask,
                                    const std::optional<double>& scale) {
  const Call call{query, key, value, attn_mask, dropout_p, is_causal, /*top_left=*/true, scale};
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
  const Call call{query, key, value, attn_mask, dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call) || !belong(call, Arrangement::kByRows, grad_out, out, logsumexp)) return std::nullopt;
  return all_gradients(call, Arrangement::kByRows, four_dimensions(attn_mask), grad_out, out, logsumexp);
}

// ---- aten::_scaled_dot_product_efficient_attention ------------------------------------------------------------------

std::optional<Tensors4> efficient_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool compute_log_sumexp, double dropout_p,
                                          bool is_causal, const std::optional<double>& scale) {
  const Call call{query, key, value, attn_bias, dropout_p, is_causal, /*top_left=*/true, scale};
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
  const Call call{query, key, value, defined(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
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

// ---- aten::_scaled_dot_product_cudnn_attention ----------------------------------------------------------------------

std::optional<FlashResults> cudnn_forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                          const OptionalTensor& attn_bias, bool /*compute_log_sumexp*/,
                                          double dropout_p, bool is_causal, bool return_debug_mask,
                                          const std::optional<double>& scale) {
  const Call call{query, key, value, attn_bias, dropout_p, is_causal, /*top_left=*/true, scale};
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
  const Call call{query, key, value, defined(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
  if (!is_served(call) || !has_known_order(call) || !logsumexp.is_contiguous()) return std::nullopt;
  const int64_t batch = query.size(0), heads = query.size(1), seqlen = query.size(2);
  if (logsumexp.numel() != batch * heads * seqlen) return std::nullopt;
  const Tensor lse = with_strides(logsumexp, {batch, heads, seqlen}, {heads * seqlen, seqlen, 1});
  const OptionalTensor scores = four_dimensions(call.scores);
  const Arrangement arrangement = arrange(call, scores);
  if (!belong(call, arrangement, grad_out, out, lse)) return std::nullopt;
  return in_order_of_inputs(all_gradients(call, arrangement, scores, grad_out, out, lse), call);
}

// ---- aten::_scaled_dot_product_fused_attention_overrideable ---------------------------------------------------------

namespace {

constexpr const char* kNotTaken =
    "aten::_scaled_dot_product_fused_attention_overrideable is for calls of scaled_dot_product_attention that need no "
    "copies; these arguments would";

/// The numbers that flash_ext.draw_rng_state() takes from torch's generator of the device.
Tensor draw_rng_state(const Tensor& like) {
  const Tensor state = new_empty(like, {2}, ScalarType::Long);
  std::array<StableIValue, 4> stack{
      torch::stable::detail::from(state), torch::stable::detail::from(int64_t{0}),
      torch::stable::detail::from(std::optional<int64_t>(std::numeric_limits<int64_t>::max())),
      torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::random_", "from", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

/// A gradient in its input's memory order, if that has one, or undefined.
Tensor gradient_in_order(const OptionalTensor& gradient, Arrangement arrangement, const Tensor& input) {
  if (!gradient) return Tensor();
  const Tensor rows = from_rows(arrangement, *gradient, input.size(0), input.size(1));
  return has_zero_stride(input) ? rows : in_order_of(rows, input);
}

/// A gradient of a bias, which is contiguous, with the dimensions that the bias came with.
Tensor gradient_of_bias(const OptionalTensor& gradient, const Tensor& bias) {
  if (!gradient) return Tensor();
  Shape strides(bias.dim());
  int64_t stride = 1;
  for (size_t d = strides.size(); d-- > 0; stride *= bias.size(static_cast<int64_t>(d))) strides[d] = stride;
  return with_strides(*gradient, shape_of(bias), strides);
}

}  // namespace

FlashResults fused_forward(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_bias,
                           double dropout_p, bool is_causal, bool return_debug_mask,
                           const std::optional<double>& scale) {
  Call call{query, key, value, four_dimensions(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
  check(!return_debug_mask && fits_operators(call) && !has_zero_stride(query), kNotTaken);
  if (dropout_p != 0) call.rng_state = draw_rng_state(query);
  const auto [out, lse] = attend_arranged(call, arrange(call, call.scores), call.scores);
  return with_lengths(call, in_order_of(out, query), lse, call.rng_state.value_or(Tensor()), Tensor(), Tensor());
}

Tensors4 fused_backward(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& attn_bias, const std::vector<int64_t>& grad_input_mask, const Tensor& out,
                        const Tensor& logsumexp, const Tensor& /*cum_seq_q*/, const Tensor& /*cum_seq_k*/,
                        int64_t /*max_q*/, int64_t /*max_k*/, double dropout_p, bool is_causal,
                        const Tensor& philox_seed, const Tensor& /*philox_offset*/,
                        const std::optional<double>& scale) {
  if (!grad_out.defined()) return {};
  // What hooks on saved tensors give back may have other strides than what was saved.
  const Tensor q = with_contiguous_rows(query), k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  const Tensor grad_rows = with_contiguous_rows(grad_out), out_rows = with_contiguous_rows(out);
  const Call call{q,
                  k,
                  v,
                  four_dimensions(defined(attn_bias)),
                  dropout_p,
                  is_causal,
                  /*top_left=*/true,
                  scale,
                  defined(philox_seed)};
  check(fits_operators(call), kNotTaken);
  Arrangement arrangement = arrange(call, call.scores);
  if (!belong(call, arrangement, grad_rows, out_rows, logsumexp)) arrangement = Arrangement::kByRows;
  const Needed needed{/*dq=*/grad_input_mask.at(0) != 0, /*dk=*/grad_input_mask.at(1) != 0,
                      /*dv=*/grad_input_mask.at(2) != 0, /*dbias=*/grad_input_mask.at(3) != 0};
  const BackwardCall done =
      differentiate_arranged(call, arrangement, call.scores, grad_rows, out_rows, logsumexp, needed);
  return {gradient_in_order(done.dq, arrangement, q), gradient_in_order(done.dk, arrangement, k),
          gradient_in_order(done.dv, arrangement, v), gradient_of_bias(done.dbias, attn_bias)};
}

}  // namespace flash_ext::api
