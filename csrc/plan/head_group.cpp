#include "operations.h"

namespace flash_ext::plan {

void choose_head_group(Draft& draft) {
  constexpr int64_t kFewQueries = 64;
  const Problem& p = draft.p;
  const bool free_order = !p.has_block_mask && p.dropout_p == 0;
  if (!free_order || p.heads_q == p.heads_kv || runs_forward(draft)) return;
  const int64_t group = p.heads_q / p.heads_kv;
  if (p.batch_invariant) {
    draft.plan.head_group = group;
    draft.because(group, " heads share a tile: batch_invariant, so the other sequences' queries do not count");
    return;
  }
  if (p.seqlen_q > kFewQueries && p.device == Device::kCpu) return;
  draft.plan.head_group = group;
  draft.because(group, " heads share a tile: with ", p.seqlen_q, " queries, reading the keys is what costs");
}

}  // namespace flash_ext::plan
