#include "kernels/common/scheduler/work_order.h"
#include "lengths.h"
#include "operations.h"

namespace flash_ext::plan {

void explain_work_list(Draft& draft, PackedSide side) {
  constexpr int64_t kUsualBlock = 128;
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
