// aten::_scaled_dot_product_fused_attention_overrideable: flash_ext/integrations/aten_fused.py says when torch calls
// it.
#include <array>
#include <limits>

#include "aten_calls.h"

namespace flash_ext::api {
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

/// The gradient in its input's memory order, if the input has one without strides of 0; undefined for no gradient.
Tensor gradient_in_order(const OptionalTensor& gradient, Arrangement arrangement, const Tensor& input) {
  if (!gradient) return Tensor();
  const Tensor rows = from_rows(arrangement, *gradient, input.size(0), input.size(1));
  return has_zero_stride(input) ? rows : in_order_of(rows, input);
}

/// The gradient of a bias, contiguous, with the dimensions that the bias came with; undefined for no gradient.
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
  AtenCall call{query, key, value, four_dimensions(attn_bias), dropout_p, is_causal, /*top_left=*/true, scale};
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
  // Hooks on saved tensors may give back tensors with other strides than were saved.
  const Tensor q = with_contiguous_rows(query), k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  const Tensor grad_rows = with_contiguous_rows(grad_out), out_rows = with_contiguous_rows(out);
  const AtenCall call{q,
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
