#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {

void plan_forward(Draft& draft) {
  if (draft.p.device == Device::kCpu) choose_head_group(draft);
  keep_keys_together(draft);
  draft.kernel.choose_tiles(draft);
  explain_work_list(draft, PackedSide::kQueries);
}

}  // namespace flash_ext::plan
