// Block lists of masks: from intervals of keys, and transposed.
#pragma once

#include "attention.h"
#include "kernels/common/block_lists/interval_lists.h"
#include "kernels/common/block_lists/transposed_lists.h"

namespace flash_ext::cpu {

/// Writes every element of all four tensors; entries past the last block are 0.
void interval_block_lists(const IntervalListsParams& params, ParallelFor parallel_for);

/// Writes every element of all four tensors, as above.
void block_lists_transposed(const TransposedListsParams& params, ParallelFor parallel_for);

}  // namespace flash_ext::cpu
