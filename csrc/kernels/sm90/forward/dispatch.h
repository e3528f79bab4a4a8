// Turns dtype and head dims, which are numbers at run time, into the types that the forward is instantiated for.
#pragma once

#include <iterator>

#include "kernels/common/dropout/philox.h"
#include "kernels/common/head_dim.h"
#include "kernels/params.h"
#include "kernels/sm90/common/element.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Calls run(HeadDim<n>(), HeadDim<n>()) for the first entry of kForwardHeadDims, from kIndex on, that serves the call.
template <int kIndex = 0, class Run>
void with_forward_head_dims(const AttentionParams& p, Run run) {
  constexpr HeadDims kDims = kForwardHeadDims[kIndex];
  if constexpr (kIndex + 1 < std::size(kForwardHeadDims)) {
    if (!kDims.serve(p.head_dim, p.head_dim_v)) return with_forward_head_dims<kIndex + 1>(p, run);
  }
  run(HeadDim<kDims.qk>(), HeadDim<kDims.v>());
}

/// Whether the forward's variant with options serves a call.
inline bool has_forward_options(const AttentionParams& p) {
  return p.bias.data || p.mask.data || p.blocks.offsets || p.dropout.rule.threshold > 0;
}

/// Whether k and v are a cache, contiguous or paged.
inline bool has_cache(const AttentionParams& p) { return p.seq.block_table || p.seq.cache_batch > 0; }

/// Calls run(Element(), HeadDim<n>()) for the variant with options.
template <class Run>
void with_forward_options_types(const AttentionParams& p, Run run) {
  with_types_of<64, 128, 256>(p, first_that_serves(kForwardOptionsHeadDims, p.head_dim, p.head_dim_v).qk, run);
}

/// Calls run(Element(), HeadDim<n>()) for the variant of block masks.
template <class Run>
void with_forward_blocks_types(const AttentionParams& p, Run run) {
  with_types_of<64, 128>(p, first_that_serves(kForwardBlocksHeadDims, p.head_dim, p.head_dim_v).qk, run);
}

/// Calls run(Element(), HeadDim<n>()) for the variant of caches.
template <class Run>
void with_forward_cache_types(const AttentionParams& p, Run run) {
  with_types_of<64, 128, 256>(p, first_that_serves(kForwardCacheHeadDims, p.head_dim, p.head_dim_v).qk, run);
}

/// Calls run(Element(), HeadDim<n>(), HeadDim<n>()) for the variant with max_logit.
template <class Run>
void with_forward_max_logit_types(const AttentionParams& p, Run run) {
  const HeadDims dims = first_that_serves(kForwardMaxLogitHeadDims, p.head_dim, p.head_dim_v);
  if (dims.v < dims.qk) return with_element(p, [&](auto element) { run(element, HeadDim<192>(), HeadDim<128>()); });
  with_types_of<64, 128, 256>(p, dims.qk, [&](auto element, auto head_dim) { run(element, head_dim, head_dim); });
}

/// Calls run(Element(), HeadDim<n>(), HeadDim<n>()) for the plain variant and the variant with score options.
template <class Run>
void with_forward_types(const AttentionParams& p, Run run) {
  with_element(p, [&](auto element) {
    with_forward_head_dims(p, [&](auto head_dim, auto head_dim_v) { run(element, head_dim, head_dim_v); });
  });
}

}  // namespace flash_ext::sm90
