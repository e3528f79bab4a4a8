#include "decode.h"

#include "lengths.h"
#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {

bool has_few_queries(const Problem& p) { return typical_queries(p) < kPrefillRows; }

bool has_few_tiles(const Problem& p) {
  return p.batch * p.heads_q * ceil_div(typical_queries(p), kPrefillRows) < p.num_workers;
}

bool runs_forward(const Draft& draft) { return draft.kernel.decode_splits != DecodeSplits::kForSms; }

void plan_decode(Draft& draft) {
  choose_head_group(draft);
  choose_decode_splits(draft);
  draft.kernel.choose_tiles(draft);
  if (runs_forward(draft)) explain_work_list(draft, PackedSide::kQueries);
}

}  // namespace flash_ext::plan
