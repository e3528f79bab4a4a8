// The kernels of CUDA except attention.
#include <torch/csrc/stable/library.h>

#include "aten_overrides.h"
#include "cuda_stream.h"
#include "kernels.h"
#include "kernels/sm80/add_layer_norm/add_layer_norm.h"
#include "kernels/sm80/block_lists/block_lists.h"
#include "kernels/sm80/dropout_mask/dropout_mask.h"
#include "kernels/sm80/merge/merge.h"

namespace flash_ext::api {

void run_merge(const Tensor& like, const MergeParams& params) { sm80::merge(params, stream_of(like)); }

void run_merge_backward(const Tensor& like, const MergeBackwardParams& params) {
  sm80::merge_backward(params, stream_of(like));
}

void run_add_layer_norm(const Tensor& like, const AddLayerNormParams& params) {
  sm80::add_layer_norm(params, stream_of(like));
}

void run_dropout_mask(const Tensor& like, const DropoutMaskParams& params) {
  sm80::dropout_mask(params, stream_of(like));
}

void run_interval_block_lists(const Tensor& like, const IntervalListsParams& params) {
  sm80::interval_block_lists(params, stream_of(like));
}

void run_block_lists_transposed(const Tensor& like, const TransposedListsParams& params) {
  sm80::block_lists_transposed(params, stream_of(like));
}

STABLE_TORCH_LIBRARY_IMPL(flash_ext, CompositeExplicitAutograd, m) {
  m.impl("override_aten_by_cuda", TORCH_BOX(&override_aten));
  m.impl("restore_aten_by_cuda", TORCH_BOX(&restore_aten));
  m.impl("fill_fused_attention_by_cuda", TORCH_BOX(&fill_fused_attention));
  m.impl("aten_calls_by_cuda", TORCH_BOX(&aten_calls));
}

}  // namespace flash_ext::api
