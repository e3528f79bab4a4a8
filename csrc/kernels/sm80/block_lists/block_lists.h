// Block lists of masks: from intervals of keys, and transposed.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_ext {

struct IntervalListsParams;
struct TransposedListsParams;

namespace sm80 {

/// Writes every element of all four tensors; entries past the last block are 0.
void interval_block_lists(const IntervalListsParams& params, cudaStream_t stream);

/// Writes every element of all four tensors, as above.
void block_lists_transposed(const TransposedListsParams& params, cudaStream_t stream);

}  // namespace sm80
}  // namespace flash_ext
