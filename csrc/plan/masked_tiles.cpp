#include "masked_tiles.h"

#include <algorithm>

#include "features.h"

namespace flash_ext::plan {
namespace {

/// What stands in the way, each after a comma and a space.
std::string obstacles(const Problem& p, const ListsNeed& need) {
  std::string found;
  if (need.others != 0) found += text(", other options (", words_of_all(need.others, p).substr(1), ")");
  if (!need.serves_scale) found += text(", softmax_scale ", p.softmax_scale);
  if (p.window_left >= 0 || p.window_right >= 0)
    found += ", a window or causal beside it (BlockMask.causal and sliding_window can be part of it, by &)";
  if (p.varlen) found += ", lengths that lie on the device";
  if (std::max(p.head_dim, p.head_dim_v) > need.most_head_dim) found += text(", head dims above ", need.most_head_dim);
  if (p.block_m % need.queries != 0 || p.block_n % need.keys != 0)
    found +=
        text(", blocks of ", p.block_m, " x ", p.block_n, " that are no multiples of ", need.queries, " x ", need.keys);
  return found;
}

}  // namespace

void explain_idle_lists(Draft& draft, const ListsNeed& need) {
  if (!draft.explain) return;
  const std::string found = obstacles(draft.p, need);
  if (found.empty()) return;
  draft.because("the lists of the block mask do not drive the loads: each tile looks up its block, because of ",
                found.substr(2));
}

}  // namespace flash_ext::plan
