#include "kernels/launch.h"
#include "kernels/sm90/forward/aligned_bias.cuh"
#include "kernels/sm90/forward/dispatch.h"
#include "kernels/sm90/forward/forward.h"
#include "kernels/sm90/forward/forward_call.h"
#include "kernels/sm90/forward/split_kv.h"
#include "kernels/sm90/forward/variant_of_call.h"
#include "kernels/sm90/forward/visibility.cuh"

namespace flash_ext::sm90 {
namespace {

/// Returns the queries of a tile of the variant with options.
int options_block_m(const ForwardParams& p) {
  const ForwardVariant variant = forward_variant(variant_options(p));
  return forward_options_shape(forward_head_dims(p.head_dim, p.head_dim_v, true), variant).warpgroups * kWarpgroupRows;
}

/// The workspace of the variant with options: the counter of the schedule, or the list that has it; an aligned bias;
/// the bits and entries of ForwardVisibility.
struct ForwardOptionsWorkspace {
  int64_t bias_offset, visibility_offset, bytes;

  explicit ForwardOptionsWorkspace(const ForwardParams& p)
      : bias_offset(std::max<int64_t>(16, forward_work_list(p, options_block_m(p)).bytes())),
        visibility_offset(bias_offset + AlignedBias(p, nullptr).bytes),
        bytes(visibility_offset + VisibilitySizes(p).bytes()) {}
};

}  // namespace

int64_t forward_workspace_bytes(const ForwardParams& params, int64_t block_n, const KeySplits& splits) {
  if (lists_blocks(blocks_call(params))) return forward_blocks_order(params, params.block_m).bytes();
  if (has_forward_options(params)) return ForwardOptionsWorkspace(params).bytes;
  const HeadDims dims = has_cache(params) ? first_that_serves(kForwardCacheHeadDims, params.head_dim, params.head_dim_v)
                        : params.max_logit
                            ? first_that_serves(kForwardMaxLogitHeadDims, params.head_dim, params.head_dim_v)
                            : forward_head_dims(params.head_dim, params.head_dim_v);
  const ForwardShape shape = forward_shape_with(dims, params.block_m, block_n);
  const WorkListPlan list = forward_work_list(params, shape.warpgroups * kWarpgroupRows);
  if (list.listed) return list.bytes();
  return split_kv_workspace_bytes(params, shape, dims, splits);
}

void forward(const ForwardParams& params, int64_t block_n, const KeySplits& splits, void* workspace,
             cudaStream_t stream) {
  ForwardCall call = {params, block_n, splits, {}, workspace, stream};
  if (lists_blocks(blocks_call(params))) {
    return with_forward_blocks_types(params, [&](auto element, auto head_dim) {
      run_forward<ForwardFamily::kBlocks, decltype(element), decltype(head_dim)::value>(call);
    });
  }
  if (has_cache(params)) {
    return with_forward_cache_types(params, [&](auto element, auto head_dim) {
      run_forward<ForwardFamily::kCache, decltype(element), decltype(head_dim)::value>(call);
    });
  }
  if (params.max_logit) {
    return with_forward_max_logit_types(params, [&](auto element, auto head_dim, auto head_dim_v) {
      run_forward<ForwardFamily::kMaxLogit, decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(
          call);
    });
  }
  if (!has_forward_options(params)) {
    return with_forward_types(params, [&](auto element, auto head_dim, auto head_dim_v) {
      run_forward<ForwardFamily::kRange, decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(
          call);
    });
  }
  char* const memory = static_cast<char*>(workspace);
  const ForwardOptionsWorkspace entries(params);
  call.p.bias = align_bias(params, memory + entries.bias_offset, stream);
  call.visible = find_visibility(call.p, memory + entries.visibility_offset, stream);
  with_forward_options_types(call.p, [&](auto element, auto head_dim) {
    run_forward<ForwardFamily::kVisible, decltype(element), decltype(head_dim)::value>(call);
  });
}

}  // namespace flash_ext::sm90
