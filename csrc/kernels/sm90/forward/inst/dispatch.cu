#include "kernels/launch.h"
#include "kernels/sm90/forward/aligned_bias.cuh"
#include "kernels/sm90/forward/dispatch.h"
#include "kernels/sm90/forward/forward.h"
#include "kernels/sm90/forward/forward_call.h"
#include "kernels/sm90/forward/launch_plan.h"
#include "kernels/sm90/forward/variant_of_call.h"
#include "kernels/sm90/forward/visibility.cuh"

namespace flash_ext::sm90 {
namespace {

/// Returns the queries of a tile of the variant with bias, masks or dropout that serves a call.
int options_block_m(const ForwardParams& p) {
  const ForwardVariant variant = forward_variant(variant_options(p));
  return forward_options_shape(forward_head_dims(p.head_dim, p.head_dim_v, true), variant).warpgroups * kWarpgroupRows;
}

/// The workspace of the variants with bias, masks or dropout: the counter of the schedule, or the list that has it; an
/// aligned bias; the bits and entries of ForwardVisibility.
struct ForwardOptionsWorkspace {
  int64_t bias_offset, visibility_offset, bytes;

  explicit ForwardOptionsWorkspace(const ForwardParams& p)
      : bias_offset(std::max<int64_t>(16, forward_work_list(p, options_block_m(p)).bytes())),
        visibility_offset(bias_offset + AlignedBias(p, nullptr).bytes),
        bytes(visibility_offset + VisibilitySizes(p).bytes()) {}
};

/// Runs the kernel of a family for the first head dims of its table that serve the call.
template <ForwardFamily kFamily, const auto& kHeadDims>
void run(const ForwardCall& call) {
  with_forward_types<kHeadDims>(call.p, [&](auto element, auto head_dim, auto head_dim_v) {
    run_forward<kFamily, decltype(element), decltype(head_dim)::value, decltype(head_dim_v)::value>(call);
  });
}

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
  if (lists_blocks(blocks_call(params))) return run<ForwardFamily::kBlocks, kForwardBlocksHeadDims>(call);
  if (has_cache(params)) return run<ForwardFamily::kCache, kForwardCacheHeadDims>(call);
  if (params.max_logit) return run<ForwardFamily::kMaxLogit, kForwardMaxLogitHeadDims>(call);
  if (!has_forward_options(params)) return run<ForwardFamily::kRange, kForwardHeadDims>(call);
  char* const memory = static_cast<char*>(workspace);
  const ForwardOptionsWorkspace entries(params);
  call.p.bias = align_bias(params, memory + entries.bias_offset, stream);
  call.visible = find_visibility(call.p, memory + entries.visibility_offset, stream);
  run<ForwardFamily::kVisible, kForwardOptionsHeadDims>(call);
}

}  // namespace flash_ext::sm90
