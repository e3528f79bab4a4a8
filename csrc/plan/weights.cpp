#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {

void plan_weights(Draft& draft) {
  keep_keys_together(draft);
  draft.kernel.choose_tiles(draft);
}

void plan_weights_backward(Draft& draft) {
  keep_keys_together(draft);
  draft.kernel.choose_tiles(draft);
  if (draft.p.device == Device::kCpu) draft.because("1 key chunk per head: dlse of a query sums over all its keys");
}

}  // namespace flash_ext::plan
