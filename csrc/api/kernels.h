// The kernels of prepared calls. Each library implements these functions for its device. On CUDA they launch on torch's
// current stream of the device of `like`, any tensor of the call, under a DeviceScope of the caller.
#pragma once

#include "checks.h"
#include "kernels/common/block_lists/interval_lists.h"
#include "kernels/common/block_lists/transposed_lists.h"
#include "plan/plan.h"

namespace flash_ext::api {

void run_forward(const Tensor& like, const plan::Plan& plan, const ForwardParams& params);
void run_backward(const Tensor& like, const plan::Plan& plan, const BackwardParams& params);
void run_weights(const Tensor& like, const WeightsParams& params);
void run_weights_backward(const Tensor& like, const plan::Plan& plan, const BackwardParams& params);

/// `appended`: run_append() came right before, and the decode may begin while it ends.
void run_decode(const Tensor& like, const plan::Plan& plan, const ForwardParams& params, bool appended);
void run_append(const Tensor& like, const AppendParams& params);

void run_merge(const Tensor& like, const MergeParams& params);
void run_merge_backward(const Tensor& like, const MergeBackwardParams& params);
void run_add_layer_norm(const Tensor& like, const AddLayerNormParams& params);
void run_dropout_mask(const Tensor& like, const DropoutMaskParams& params);
void run_interval_block_lists(const Tensor& like, const IntervalListsParams& params);
void run_block_lists_transposed(const Tensor& like, const TransposedListsParams& params);

}  // namespace flash_ext::api
