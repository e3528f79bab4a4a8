#include "kernels/sm80/block_lists/block_lists.h"
#include "kernels/sm80/block_lists/kernel.cuh"

namespace flash_ext::sm80 {

void interval_block_lists(const IntervalListsParams& params, cudaStream_t stream) {
  run_interval_block_lists(params, stream);
}

void block_lists_transposed(const TransposedListsParams& params, cudaStream_t stream) {
  run_block_lists_transposed(params, stream);
}

}  // namespace flash_ext::sm80
