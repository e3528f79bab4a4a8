#include "kernels/common/scheduler/work_order.h"
#include "lengths.h"
#include "operations.h"

namespace flash_ext::plan {

namespace {

constexpr int64_t kUsualBlock = 128;  // where the kernel decides

}  // namespace

bool lists_query_tiles(const Draft& draft) {
  const Problem& p = draft.p;
  const int64_t block = draft.plan.block_m > 0 ? draft.plan.block_m : kUsualBlock;
  return p.total_q > 0 && lists_tiles(p.batch, p.seqlen_q, p.total_q, block, p.heads_q);
}

void explain_sections(Draft& draft, int64_t heads, int64_t all_heads, const std::string& more) {
  if (!draft.explain) return;
  if (heads == all_heads) {
    draft.because("order of query tiles: all heads side by side", more, ", most keys first");
  } else {
    draft.because(
        "order of query tiles: ", heads == 1 ? "one head after the other" : text(heads, " heads side by side"), more,
        ", so that keys stay in L2");
  }
}

void explain_work_list(Draft& draft, PackedSide side) {
  const Problem& p = draft.p;
  const bool keys = side == PackedSide::kKeys;
  const int64_t rows = keys ? p.total_k : p.total_q, longest = keys ? p.seqlen_k : p.seqlen_q;
  if (!draft.explain || p.device == Device::kCpu || rows == 0) return;
  const int64_t planned = keys ? draft.plan.block_n : draft.plan.block_m, block = planned > 0 ? planned : kUsualBlock;
  const int64_t heads = keys ? p.heads_kv : p.heads_q, grid = p.batch * ceil_div(longest, block);
  const int64_t most = most_tiles(p.batch, longest, rows, block);
  const char* const what = keys ? " keys" : " queries";
  const KeyTileSchedule& schedule = draft.plan.schedule;
  const bool splits = keys && schedule.head_splits * schedule.query_splits > 1;
  if (lists_tiles(p.batch, longest, rows, block, heads)) {
    draft.because("packed: tiles of ", block, what, " are listed on the device, longest first; ", most,
                  " a head at most, where the bound on the lengths allows ", grid);
  } else if (splits && most < grid) {
    draft.because("packed: tiles of ", block, what, " are listed on the device, longest first, as they are split; ",
                  most, " a head at most, where the bound on the lengths allows ", grid);
  } else {
    draft.because("packed: a grid of ", counted(grid, "tile"), " of ", block, what, " a head, ", most,
                  " of which exist at most: a list is not worth its time");
  }
}

}  // namespace flash_ext::plan
