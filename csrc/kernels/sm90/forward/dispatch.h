// Turns dtype and head dims, which are numbers at run time, into the types that the forward is instantiated for.
#pragma once

#include <iterator>

#include "kernels/common/head_dim.h"
#include "kernels/params.h"
#include "kernels/sm90/common/element.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Calls run(HeadDim<n>(), HeadDim<n>()) for the first entry of a table of shape.h, from kIndex on, that serves the
/// call, or for the last one.
template <const auto& kTable, int kIndex = 0, class Run>
void with_head_dims_of(const AttentionParams& p, Run run) {
  constexpr HeadDims kDims = kTable[kIndex];
  if constexpr (kIndex + 1 < std::size(kTable)) {
    if (!kDims.serve(p.head_dim, p.head_dim_v)) return with_head_dims_of<kTable, kIndex + 1>(p, run);
  }
  run(HeadDim<kDims.qk>(), HeadDim<kDims.v>());
}

/// Calls run(Element(), HeadDim<n>(), HeadDim<n>()), with the first entry of a table that serves the call.
template <const auto& kTable, class Run>
void with_forward_types(const AttentionParams& p, Run run) {
  with_element(p, [&](auto element) {
    with_head_dims_of<kTable>(p, [&](auto head_dim, auto head_dim_v) { run(element, head_dim, head_dim_v); });
  });
}

/// Whether a call has a bias, masks or dropout.
inline bool has_forward_options(const AttentionParams& p) {
  return p.bias.data || p.mask.data || p.blocks.offsets || p.dropout.rule.threshold > 0;
}

/// Whether k and v are a cache, contiguous or paged.
inline bool has_cache(const AttentionParams& p) { return p.seq.block_table || p.seq.cache_batch > 0; }

}  // namespace flash_ext::sm90
