#include <initializer_list>
#include <utility>

#include "attention.h"
#include "op_arguments.h"
#include "operators.h"

namespace flash_ext::api {
namespace {

/// Checks that `rows`, out or its gradient, has the device, dtype and shape of out.
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

/// A new contiguous tensor for the gradient of `input`.
Tensor gradient(const Tensor& input) { return new_empty(input, shape_of(input), input.scalar_type()); }

/// The gradient of out as TMA can read it: an absent one becomes zeros, and one with a stride of 0 is copied.
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

/// The gradient, or the empty tensor that operators return for a gradient that is not wanted.
Tensor gradient_or_empty(const OptionalTensor& gradient, const Tensor& like) {
  return gradient ? *gradient : new_empty(like, {0}, like.scalar_type());
}

/// dsink converted from the accumulate type to sink's dtype, or an empty tensor.
Tensor finish_dsink(const BackwardCall& call, const Tensor& q, const ScoreOptions& options) {
  return call.dsink ? with_dtype(*call.dsink, options.sink->scalar_type()) : gradient_or_empty(call.dsink, q);
}

}  // namespace

BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed) {
  const DeviceScope scope(q);
  BackwardCall call = prepare_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  run_backward(q, call.plan, call.params);
  return call;
}

namespace {

Tensors5 attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, bool deterministic,
                            bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dsink,
                            FLASH_EXT_SCORE_PARAMETERS) {
  const DeviceScope scope(q);
  const ScoreOptions options = FLASH_EXT_SCORE_OPTIONS;
  const Needed needed{need_dq, need_dk, need_dv, need_dbias, need_dsink, false};
  const BackwardCall call = attend_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), given(call.dv), given(call.dbias), finish_dsink(call, q, options)};
}

Tensors4 attention_weights_backward(const Tensor& grad_weights, const Tensor& q, const Tensor& k, const Tensor& lse,
                                    int64_t dropout_mode, bool need_dq, bool need_dk, bool need_dlse, bool need_dbias,
                                    FLASH_EXT_SCORE_PARAMETERS) {
  const DeviceScope scope(q);
  const Needed needed{need_dq, need_dk, false, need_dbias, false, need_dlse};
  const BackwardCall call =
      prepare_weights_backward(grad_weights, q, k, lse, FLASH_EXT_SCORE_OPTIONS, dropout_mode, needed);
  run_weights_backward(q, call.plan, call.params);
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), gradient_or_empty(call.dlse, lse), given(call.dbias)};
}

}  // namespace

FLASH_EXT_OPERATORS(m) {
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_weights_backward", TORCH_BOX(&attention_weights_backward));
}

}  // namespace flash_ext::api
