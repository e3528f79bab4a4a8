#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {
namespace {

/// Where max_logit comes from, for the reader.
void explain_max_logit(Draft& draft) {
  if (!draft.p.wants_max_logit) return;
  if (draft.p.device == Device::kCpu) {
    draft.because("max_logit: the largest of the row maxima of the softmax");
  } else if (draft.plan.fuses_max_logit) {
    draft.because("max_logit: by the forward itself, from the largest weight of each row");
  } else {
    draft.because("max_logit: sm80/max_logit, a kernel of its own after the forward, computes the scores again");
  }
}

}  // namespace

void plan_forward(Draft& draft) {
  if (draft.p.device == Device::kCpu) choose_head_group(draft);
  keep_keys_together(draft);
  draft.kernel.choose_tiles(draft);
  explain_work_list(draft, PackedSide::kQueries);
  explain_max_logit(draft);
}

}  // namespace flash_ext::plan
