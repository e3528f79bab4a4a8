// What explain() says of masks on kernels for Hopper: what they save, and why the lists of a block mask do not drive
// loads.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// What kernels for Hopper do with a mask other than a block mask.
constexpr char kHiddenTiles[] = "tiles of which the mask hides all pairs are not computed";
constexpr char kHiddenKeys[] = "tiles of keys that the mask hides from all heads of a group are not computed";

/// What the kernel that lists drive needs of a call.
struct ListsNeed {
  unsigned others;        // features of the call, beside the block mask, that this kernel lacks
  bool serves_scale;      // whether it serves the call's softmax_scale
  int64_t most_head_dim;  // of q, k and v
  int64_t queries, keys;  // blocks are multiples of these
};

/// Adds a reason that names what the call has and the kernel that lists drive lacks.
void explain_idle_lists(Draft& draft, const ListsNeed& need);

}  // namespace flash_ext::plan
