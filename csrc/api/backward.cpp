#include <initializer_list>
#include <utility>

#include "attention.h"
#include "tensors.h"

namespace flash_ext::api {
namespace {

/// `rows` is out or its gradient.
void check_out_like(const Argument& q, const Geometry& g, const char* name, const Tensor& rows) {
  Argument(name, rows)
      .same_device_as(q)
      .same_dtype_as(q)
      .shape_is(g.out_shape(),
                g.varlen_q ? "(total_q, heads_q, head_dim_v)" : "(batch, seqlen_q, heads_q, head_dim_v)");
}

/// An input of the forward as autograd gives it back: hooks on saved tensors may have changed its strides.
Tensor saved_rows(const Tensor& input) { return input.dim() > 0 ? with_contiguous_rows(input) : input; }

/// Keeps inputs alive until the kernels are launched.
void keep(BackwardCall& call, std::initializer_list<Tensor> inputs) { call.owned.insert(call.owned.end(), inputs); }

/// A gradient like `input`, contiguous.
Tensor gradient(const Tensor& input) { return new_empty(input, shape_of(input), input.scalar_type()); }

/// The gradient of out as TMA reads it: it must be there, and takes no stride of 0.
Tensor for_tma(const OptionalTensor& grad_out, const Tensor& out) {
  if (!grad_out) return new_zeros(out, shape_of(out), out.scalar_type());
  return is_broadcast(*grad_out) ? made_contiguous(*grad_out) : *grad_out;
}

void need_bias(const ScoreOptions& options, bool needed) {
  check(!needed || options.bias.has_value(), "need_dbias asks for the gradient of bias, which is None");
}

BackwardCall new_backward_call(AttentionCall attention, const ScoreOptions& options, const Needed& needed) {
  BackwardCall call;
  call.plan = std::move(attention.plan);
  call.params = {attention.params};
  call.owned = std::move(attention.owned);
  call.params.num_chunks = call.plan.num_chunks;
  call.params.schedule = call.plan.schedule;
  if (needed.dbias) {
    // Packed sequences may all end before the last rows and columns of bias.
    const Tensor& bias = *options.bias;
    call.dbias = options.cu_seqlens_q ? new_zeros(bias, shape_of(bias), bias.scalar_type()) : gradient(bias);
    call.params.dbias = view_scores(*call.dbias);
  }
  return call;
}

void allocate_dq_dk(BackwardCall& call, const Tensor& q, const Tensor& k, const Needed& needed) {
  if (needed.dq) call.params.dq = view_rows(call.dq.emplace(gradient(q)));
  if (needed.dk) call.params.dk = view_rows(call.dk.emplace(gradient(k)));
}

}  // namespace

BackwardCall prepare_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& given_q,
                              const Tensor& given_k, const Tensor& given_v, const Tensor& out, const Tensor& lse,
                              const ScoreOptions& options, bool deterministic, const Needed& needed) {
  const Tensor q = saved_rows(given_q), k = saved_rows(given_k), v = saved_rows(given_v);
  AttentionCall attention = prepare_attention(plan::Operation::kBackward, q, k, v, options, deterministic);
  const Geometry g = attention.geometry;
  const Argument q_arg("q", q);
  check_out_like(q_arg, g, "out", out);
  check_lse(q_arg, g, "lse", lse);
  if (grad_out) check_out_like(q_arg, g, "grad_out", *grad_out);
  if (grad_lse) check_lse(q_arg, g, "grad_lse", *grad_lse);
  need_bias(options, needed.dbias);
  check(!needed.dsink || options.sink.has_value(), "need_dsink asks for the gradient of sink, which is None");

  BackwardCall call = new_backward_call(std::move(attention), options, needed);
  keep(call, {q, k, v});
  const auto own = [&](const Tensor& tensor) -> const Tensor& {
    return call.owned.emplace_back(with_contiguous_rows(tensor));
  };
  const auto own_rows = [&](const Tensor& tensor) {
    return view_rows(own(with_aligned_rows(with_contiguous_rows(tensor))));
  };
  call.params.out = own_rows(out);
  call.params.lse = view_lse(own(lse));
  if (call.plan.reads_by_tma || (needed.dbias && call.plan.bias_reads_by_tma)) {
    call.params.grad_out = own_rows(for_tma(grad_out, out));
  } else if (grad_out) {
    call.params.grad_out = own_rows(*grad_out);
  }
  if (grad_lse) call.params.grad_lse = view_lse(own(*grad_lse));
  call.params.deterministic = deterministic;

  allocate_dq_dk(call, q, k, needed);
  if (needed.dv) call.params.dv = view_rows(call.dv.emplace(gradient(v)));
  if (needed.dsink) {
    call.params.dsink = address(call.dsink.emplace(new_empty(q, {g.heads_q}, accumulate_dtype(q.scalar_type()))));
  }
  return call;
}

Tensor gradient_or_empty(const OptionalTensor& gradient, const Tensor& like) {
  return gradient ? *gradient : new_empty(like, {0}, like.scalar_type());
}

Tensor finish_dsink(const BackwardCall& call, const Tensor& q, const ScoreOptions& options) {
  return call.dsink ? with_dtype(*call.dsink, options.sink->scalar_type()) : gradient_or_empty(call.dsink, q);
}

BackwardCall prepare_weights_backward(const Tensor& grad_weights, const Tensor& given_q, const Tensor& given_k,
                                      const Tensor& lse, const ScoreOptions& options, int64_t dropout_mode,
                                      const Needed& needed) {
  const Tensor q = saved_rows(given_q), k = saved_rows(given_k);
  AttentionCall attention = prepare_attention(plan::Operation::kWeightsBackward, q, k, std::nullopt, options);
  const Geometry g = attention.geometry;
  const Argument q_arg("q", q);
  check_lse(q_arg, g, "lse", lse);
  check_dropout_mode(dropout_mode);
  Argument("grad_weights", grad_weights)
      .same_device_as(q_arg)
      .same_dtype_as(q_arg)
      .shape_is(g.score_shape(), "(batch, heads_q, seqlen_q, seqlen_k)");
  need_bias(options, needed.dbias);

  BackwardCall call = new_backward_call(std::move(attention), options, needed);
  keep(call, {q, k});
  call.params.lse = view_lse(call.owned.emplace_back(with_contiguous_rows(lse)));
  call.params.grad_weights = view_scores(grad_weights);
  call.params.dropout_mode = static_cast<int>(dropout_mode);
  allocate_dq_dk(call, q, k, needed);
  if (needed.dlse) {
    call.params.dlse = view_lse(call.dlse.emplace(new_empty(q, g.lse_shape(), lse.scalar_type())));
  }
  return call;
}

}  // namespace flash_ext::api
