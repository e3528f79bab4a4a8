#include "aten_calls.h"

#include <cmath>
#include <limits>

#include "plan/plan.h"

namespace flash_ext::api {
namespace {

constexpr int64_t kHeadDimMultiple = 8, kMaxHeadDim = 256;

bool rows_are_dense(const Tensor& x) { return x.dim() == 4 && x.stride(3) == 1; }

bool has_head_dim(const Tensor& x) {
  return x.size(3) >= 1 && x.size(3) <= kMaxHeadDim && x.size(3) % kHeadDimMultiple == 0;
}

/// Whether our operators take the scale. torch computes with Inf and NaN, too.
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

/// Whether torch's kernels would take this bias with this query.
bool may_add(const OptionalTensor& bias, const Tensor& q) {
  if (!bias) return true;
  const ScalarType dtype = bias->scalar_type();
  return (bias->dim() == 2 || bias->dim() == 4) && (dtype == ScalarType::Float || dtype == q.scalar_type());
}

ScoreOptions options_of(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores, bool allow_tf32) {
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

}  // namespace

bool fits_operators(const AtenCall& call) {
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

bool is_served(const AtenCall& call) {
  return call.dropout_p == 0 && may_add(call.scores, call.q) && fits_operators(call);
}

OptionalTensor four_dimensions(const OptionalTensor& scores) {
  if (!scores || scores->dim() == 4) return scores;
  Shape sizes = shape_of(*scores), strides(scores->strides().begin(), scores->strides().end());
  const int64_t missing = 4 - scores->dim();
  const int64_t whole = sizes.front() * strides.front();
  sizes.insert(sizes.begin(), missing, 1);
  strides.insert(strides.begin(), missing, whole);
  return with_strides(*scores, sizes, strides);
}

Arrangement arrange(const AtenCall& call, const OptionalTensor& scores) {
  return arrangement_of(call.q, call.k, call.v, scores);
}

Tensors2 attend_arranged(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores) {
  const auto rows = [&](const Tensor& x) { return to_rows(arrangement, x); };
  const ScoreOptions options = options_of(call, arrangement, scores, torch_settings(call.q, false).allow_tf32);
  const auto [rows_of_out, lse] = attend(rows(call.q), rows(call.k), rows(call.v), options);
  const int64_t batch = call.q.size(0), heads = call.q.size(1), seqlen = call.q.size(2);
  const Tensor out = from_rows(arrangement, rows_of_out, batch, heads);
  if (arrangement == Arrangement::kByRows) return {out, lse};
  return {out, with_strides(lse, {batch, heads, seqlen}, {heads * seqlen, seqlen, 1})};
}

bool belong(const AtenCall& call, Arrangement arrangement, const Tensor& grad_out, const Tensor& out,
            const Tensor& lse) {
  for (const Tensor* rows : {&grad_out, &out}) {
    if (!rows_are_dense(*rows) || !fits(arrangement, *rows)) return false;
  }
  return lse.dim() == 3 && fits(arrangement, lse);
}

BackwardCall differentiate_arranged(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores,
                                    const Tensor& grad_out, const Tensor& out, const Tensor& lse,
                                    const Needed& needed) {
  const auto rows = [&](const Tensor& x) { return to_rows(arrangement, x); };
  const TorchSettings settings = torch_settings(call.q, true);
  const ScoreOptions options = options_of(call, arrangement, scores, settings.allow_tf32);
  return attend_backward(rows(grad_out), std::nullopt, rows(call.q), rows(call.k), rows(call.v), rows(out),
                         to_lse(arrangement, lse), options, settings.deterministic, needed);
}

Tensors3 all_gradients(const AtenCall& call, Arrangement arrangement, const OptionalTensor& scores,
                       const Tensor& grad_out, const Tensor& out, const Tensor& lse) {
  const BackwardCall done =
      differentiate_arranged(call, arrangement, scores, grad_out, out, lse, {/*dq=*/true, /*dk=*/true, /*dv=*/true});
  const int64_t batch = call.q.size(0), heads_kv = call.k.size(1);
  return {from_rows(arrangement, *done.dq, batch, call.q.size(1)), from_rows(arrangement, *done.dk, batch, heads_kv),
          from_rows(arrangement, *done.dv, batch, heads_kv)};
}

FlashResults with_lengths(const AtenCall& call, const Tensor& out, const Tensor& lse, const Tensor& seed,
                          const Tensor& offset, const Tensor& debug_mask) {
  return {out, lse, Tensor(), Tensor(), call.q.size(2), call.k.size(2), seed, offset, debug_mask};
}

}  // namespace flash_ext::api
