// The kernels of the CPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "aten_overrides.h"
#include "kernels.h"
#include "kernels/cpu/add_layer_norm.h"
#include "kernels/cpu/append.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/block_lists.h"
#include "kernels/cpu/dropout_mask.h"
#include "kernels/cpu/merge.h"

namespace flash_ext::api {
namespace {

/// Threads are torch's own, so that torch.set_num_threads holds and nothing is oversubscribed.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const cpu::RangeBody& body) {
  torch::stable::parallel_for(begin, end, grain, body);
}

}  // namespace

void run_forward(const Tensor&, const plan::Plan&, const ForwardParams& params) {
  cpu::attention_forward(params, parallel_for);
}

void run_backward(const Tensor&, const plan::Plan&, const BackwardParams& params) {
  cpu::attention_backward(params, parallel_for);
}

void run_weights(const Tensor&, const WeightsParams& params) { cpu::attention_weights(params, parallel_for); }

void run_weights_backward(const Tensor&, const plan::Plan&, const BackwardParams& params) {
  cpu::attention_backward(params, parallel_for);
}

void run_append(const Tensor&, const AppendParams& params) { cpu::append_to_cache(params, parallel_for); }

void run_decode(const Tensor&, const plan::Plan&, const ForwardParams& params, bool /*appended*/) {
  cpu::attention_forward(params, parallel_for);
}

void run_merge(const Tensor&, const MergeParams& params) { cpu::merge(params, parallel_for); }

void run_merge_backward(const Tensor&, const MergeBackwardParams& params) { cpu::merge_backward(params, parallel_for); }

void run_add_layer_norm(const Tensor&, const AddLayerNormParams& params) { cpu::add_layer_norm(params, parallel_for); }

void run_dropout_mask(const Tensor&, const DropoutMaskParams& params) { cpu::dropout_mask(params, parallel_for); }

void run_interval_block_lists(const Tensor&, const IntervalListsParams& params) {
  cpu::interval_block_lists(params, parallel_for);
}

void run_block_lists_transposed(const Tensor&, const TransposedListsParams& params) {
  cpu::block_lists_transposed(params, parallel_for);
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("override_aten_by_cpu", TORCH_BOX(&override_aten));
  m.impl("restore_aten_by_cpu", TORCH_BOX(&restore_aten));
  m.impl("fill_fused_attention_by_cpu", TORCH_BOX(&fill_fused_attention));
  m.impl("aten_calls_by_cpu", TORCH_BOX(&aten_calls));
}

}  // namespace flash_ext::api
