#include <algorithm>

#include "backward_schedule.h"
#include "lengths.h"
#include "operations.h"
#include "splits.h"

namespace flash_ext::plan {
namespace {

/// On a CPU: splits the keys into chunks, each of which sums a dQ of its own.
void choose_chunks(Draft& draft) {
  constexpr int64_t kChunkKeys = 512;  // enough work to pay for one more partial dQ
  constexpr int64_t kWorkItems = 16;   // wanted in all, to keep a few threads busy at the end as well
  const Problem& p = draft.p;
  const int64_t heads = std::max<int64_t>(1, p.batch * p.heads_kv);
  const int64_t most = ceil_div(p.seqlen_k, kChunkKeys);
  draft.plan.num_chunks = std::max<int64_t>(1, std::min(most, ceil_div(kWorkItems, heads)));
  draft.because(counted(draft.plan.num_chunks, "key chunk"), " per head: ", heads, " pairs of batch and head, ",
                p.seqlen_k, " keys; shapes alone decide, so the result does not depend on the number of threads");
}

void choose_schedule(Draft& draft) {
  if (has_empty_tensors(draft.p)) return;
  const BackwardTiles tiles = draft.kernel.backward_tiles(draft.p);
  const BackwardSchedulePlan chosen = plan_backward_schedule(draft.p, tiles, draft.explain);
  draft.plan.schedule = chosen.schedule;
  draft.because(chosen.reason);
}

}  // namespace

void plan_backward(Draft& draft) {
  keep_keys_together(draft);
  draft.kernel.choose_tiles(draft);
  if (draft.p.device == Device::kCpu) return choose_chunks(draft);
  if (draft.kernel.backward_tiles == nullptr) return;  // a CTA for each head
  choose_schedule(draft);
  explain_work_list(draft, PackedSide::kKeys);
}

}  // namespace flash_ext::plan
