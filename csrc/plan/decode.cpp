#include "decode.h"

#include "lengths.h"
#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {

bool is_prefill(const Problem& p) {
  if (p.operation != Operation::kDecode || p.device != Device::kCuda || p.batch_invariant) return false;
  const int64_t queries = typical_queries(p), tiles = p.batch * p.heads_q * ceil_div(queries, kPrefillRows);
  return p.num_splits <= 1 && queries >= kPrefillRows && tiles >= p.num_workers;
}

void plan_decode(Draft& draft) {
  choose_head_group(draft);
  choose_decode_splits(draft);
  draft.kernel.choose_tiles(draft);
  if (is_prefill(draft.p)) explain_work_list(draft, PackedSide::kQueries);
}

}  // namespace flash_ext::plan
