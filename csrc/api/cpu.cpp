// The operators on a CPU: prepare the call, run the kernel, return what it wrote.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>
#include <tuple>

#include "add_layer_norm.h"
#include "attention.h"
#include "attention_args.h"
#include "attention_operators.h"
#include "block_lists.h"
#include "decode.h"
#include "dropout.h"
#include "kernels/cpu/add_layer_norm.h"
#include "kernels/cpu/append.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/block_lists.h"
#include "kernels/cpu/dropout_mask.h"
#include "kernels/cpu/merge.h"
#include "merge.h"
#include "op_arguments.h"
#include "plan/problem_text.h"

namespace flash_ext::api {
namespace {

/// Threads are torch's own, so that torch.set_num_threads holds and nothing is oversubscribed.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const cpu::RangeBody& body) {
  torch::stable::parallel_for(begin, end, grain, body);
}

}  // namespace

ForwardCall attend(const Tensor& q, const Tensor& k, const Tensor& v, const ScoreOptions& options) {
  ForwardCall call = prepare_forward(q, k, v, options);
  cpu::attention_forward(call.params, parallel_for);
  return call;
}

BackwardCall attend_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                             const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                             const ScoreOptions& options, bool deterministic, const Needed& needed) {
  BackwardCall call = prepare_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  cpu::attention_backward(call.params, parallel_for);
  return call;
}

namespace {

using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Tensors5 attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse, bool deterministic,
                            bool need_dq, bool need_dk, bool need_dv, bool need_dbias, bool need_dsink,
                            FLASH_EXT_SCORE_PARAMETERS) {
  const ScoreOptions options = FLASH_EXT_SCORE_OPTIONS;
  const Needed needed{need_dq, need_dk, need_dv, need_dbias, need_dsink, false};
  const BackwardCall call = attend_backward(grad_out, grad_lse, q, k, v, out, lse, options, deterministic, needed);
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), given(call.dv), given(call.dbias), finish_dsink(call, q, options)};
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const Tensor& lse, int64_t dropout_mode,
                         FLASH_EXT_SCORE_PARAMETERS) {
  const WeightsCall call = prepare_weights(q, k, lse, FLASH_EXT_SCORE_OPTIONS, dropout_mode);
  cpu::attention_weights({call.params, call.lse_view, call.weights_view, static_cast<int>(dropout_mode)}, parallel_for);
  return call.weights;
}

Tensors4 attention_weights_backward(const Tensor& grad_weights, const Tensor& q, const Tensor& k, const Tensor& lse,
                                    int64_t dropout_mode, bool need_dq, bool need_dk, bool need_dlse, bool need_dbias,
                                    FLASH_EXT_SCORE_PARAMETERS) {
  const Needed needed{need_dq, need_dk, false, need_dbias, false, need_dlse};
  const BackwardCall call =
      prepare_weights_backward(grad_weights, q, k, lse, FLASH_EXT_SCORE_OPTIONS, dropout_mode, needed);
  cpu::attention_backward(call.params, parallel_for);
  const auto given = [&](const OptionalTensor& gradient) { return gradient_or_empty(gradient, q); };
  return {given(call.dq), given(call.dk), gradient_or_empty(call.dlse, lse), given(call.dbias)};
}

Tensors2 run(const DecodeCall& call) {
  if (call.append) cpu::append_to_cache(*call.append, parallel_for);
  cpu::attention_forward(call.params, parallel_for);
  return {call.out, call.lse};
}

Tensors2 attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, FLASH_EXT_DECODE_PARAMETERS) {
  return run(prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS));
}

Tensors2 attention_decode_append(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                                 const Tensor& v, FLASH_EXT_DECODE_PARAMETERS) {
  return run(prepare_decode(q, k_cache, v_cache, NewTokens{k, v}, FLASH_EXT_DECODE_OPTIONS));
}

std::string attention_describe(const Tensor& q, const Tensor& k, const OptionalTensor& v, std::string operation,
                               bool deterministic, FLASH_EXT_SCORE_PARAMETERS) {
  return describe_in_text(operation, q, k, v, FLASH_EXT_SCORE_OPTIONS, deterministic);
}

void attention_check(const Tensor& q, const Tensor& k, const Tensor& v, FLASH_EXT_SCORE_PARAMETERS) {
  prepare_attention(plan::Operation::kForward, q, k, v, FLASH_EXT_SCORE_OPTIONS);
}

std::string attention_decode_describe(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                      FLASH_EXT_DECODE_PARAMETERS) {
  return plan::text_of(describe_decode(q, k_cache, v_cache, FLASH_EXT_DECODE_OPTIONS));
}

void attention_decode_check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            FLASH_EXT_DECODE_PARAMETERS) {
  prepare_decode(q, k_cache, v_cache, std::nullopt, FLASH_EXT_DECODE_OPTIONS);
}

Tensors2 merge(const Tensor& outs, const Tensor& lses) {
  const MergeCall call = prepare_merge(outs, lses);
  cpu::merge(call.params, parallel_for);
  return {call.out, call.lse};
}

Tensors2 merge_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse, const Tensor& outs,
                        const Tensor& lses, const Tensor& out, const Tensor& lse) {
  const MergeBackwardCall call = prepare_merge_backward(grad_out, grad_lse, outs, lses, out, lse);
  cpu::merge_backward(call.params, parallel_for);
  return {call.grad_outs, call.grad_lses};
}

Tensors2 add_layer_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                        const OptionalTensor& bias, double eps, bool need_sum) {
  const AddLayerNormCall call = prepare_add_layer_norm(x, residual, weight, bias, eps, need_sum);
  cpu::add_layer_norm(call.params, parallel_for);
  return {call.sum, call.out};
}

Tensor dropout_mask(const Tensor& rng, double dropout_p, int64_t batch, int64_t heads_q, int64_t seqlen_q,
                    int64_t seqlen_k) {
  const DropoutMaskCall call = prepare_dropout_mask(rng, dropout_p, batch, heads_q, seqlen_q, seqlen_k);
  cpu::dropout_mask(call.params, parallel_for);
  return call.keep;
}

Tensors4 interval_block_lists(const Tensor& bounds, std::string rule, int64_t seqlen_q, int64_t seqlen_k,
                              int64_t block_m, int64_t block_n, int64_t offset, int64_t window_left,
                              int64_t window_right, int64_t num_global, bool causal, int64_t max_blocks,
                              int64_t max_bitmaps) {
  const auto call =
      prepare_interval_block_lists(bounds, {rule, seqlen_q, seqlen_k, block_m, block_n, offset, window_left,
                                            window_right, num_global, causal, max_blocks, max_bitmaps});
  cpu::interval_block_lists(call.params, parallel_for);
  return call.lists.tensors();
}

Tensors4 block_lists_transposed(const Tensor& offsets, const Tensor& indices, const Tensor& bitmap_ids,
                                const Tensor& bitmaps, int64_t columns, int64_t max_blocks) {
  const auto call = prepare_block_lists_transposed(offsets, indices, bitmap_ids, bitmaps, columns, max_blocks);
  cpu::block_lists_transposed(call.params, parallel_for);
  return call.lists.tensors();
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CPU, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward));
  m.impl("attention_forward_plain", TORCH_BOX(&attention_forward_plain));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_weights", TORCH_BOX(&attention_weights));
  m.impl("attention_weights_backward", TORCH_BOX(&attention_weights_backward));
  m.impl("attention_decode", TORCH_BOX(&attention_decode));
  m.impl("attention_decode_append", TORCH_BOX(&attention_decode_append));
  m.impl("attention_describe", TORCH_BOX(&attention_describe));
  m.impl("attention_check", TORCH_BOX(&attention_check));
  m.impl("attention_decode_describe", TORCH_BOX(&attention_decode_describe));
  m.impl("attention_decode_check", TORCH_BOX(&attention_decode_check));
  m.impl("merge", TORCH_BOX(&merge));
  m.impl("merge_backward", TORCH_BOX(&merge_backward));
  m.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  m.impl("dropout_mask", TORCH_BOX(&dropout_mask));
  m.impl("interval_block_lists", TORCH_BOX(&interval_block_lists));
  m.impl("block_lists_transposed", TORCH_BOX(&block_lists_transposed));
}

}  // namespace flash_ext::api
