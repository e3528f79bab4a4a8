// What explain() says where the lists of a block mask do not drive the loads of a kernel for Hopper.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

/// What the kernel that lists drive needs of a call.
struct ListsNeed {
  bool no_option;         // the call has no option beside the mask that this kernel lacks
  int64_t most_head_dim;  // of q, k and v
  int64_t queries, keys;  // blocks are multiples of these
};

/// Adds a reason that names what the call has and the kernel that lists drive lacks.
void explain_idle_lists(Draft& draft, const ListsNeed& need);

}  // namespace flash_ext::plan
