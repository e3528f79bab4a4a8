// The number of ranges of keys whose results are combined afterwards.
#pragma once

#include "draft.h"

namespace flash_ext::plan {

constexpr int64_t kCpuMinSplitSize = 256;          // shorter ranges cost more in merging than they gain
constexpr int64_t kCpuMaxSplits = 128;             // bounds the memory of partial results
constexpr int64_t kBatchInvariantSplitSize = 512;  // constant, so that splits do not depend on the batch

/// The number of ranges of keys with which `work_items` independent items keep `num_workers` busy, on a CPU. It grows
/// with seqlen_k and num_workers, and shrinks with work_items. A range has at least kCpuMinSplitSize keys.
int64_t choose_num_splits(int64_t work_items, int64_t num_workers, int64_t seqlen_k);

/// Leaves the keys in one range, as every operation except decoding does.
void keep_keys_together(Draft& draft);

void choose_decode_splits(Draft& draft);

}  // namespace flash_ext::plan
