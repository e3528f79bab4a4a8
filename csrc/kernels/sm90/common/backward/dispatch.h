// Maps dtype and head dims, which are numbers at run time, to the types that the backward is instantiated for.
#pragma once

#include "kernels/sm90/common/element.h"
#include "shape.h"

namespace flash_ext::sm90 {

/// Calls run(Element(), HeadDim<n>()) for one of kHeadDims.
template <int... kHeadDims, class Run>
void with_backward_types(const BackwardParams& p, Run run) {
  with_types_of<kHeadDims...>(p, backward_head_dim(p.head_dim, p.head_dim_v), run);
}

}  // namespace flash_ext::sm90
