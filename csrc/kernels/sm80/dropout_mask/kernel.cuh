// The dropout mask as booleans: the one that the attention kernels compute on the fly.
//
// A thread computes one word of 32 weights at a time (common/dropout/philox.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/dropout/philox.h"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int64_t kDropoutMaskThreads = 256;

/// One thread for each word of each head.
static __global__ void __launch_bounds__(kDropoutMaskThreads)
    dropout_mask_kernel(const __grid_constant__ DropoutMaskParams p, int64_t query_groups, int64_t key_groups) {
  const PhiloxKey key = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  const int64_t words = p.batch * p.heads_q * query_groups * key_groups;
  const int64_t stride = gridDim.x * kDropoutMaskThreads;
  for (int64_t word = blockIdx.x * kDropoutMaskThreads + threadIdx.x; word < words; word += stride) {
    const int64_t key_group = word % key_groups;
    const int64_t query_group = word / key_groups % query_groups;
    const int64_t batch_head = word / key_groups / query_groups;
    const int64_t first_i = query_group / 8 * 16 + query_group % 8;
    const int64_t first_j = key_group / 4 * kDropoutKeys + key_group % 4 * 2;
    const uint32_t kept = draw_kept_weights(p.dropout.rule, key, batch_head, first_i, first_j);
#pragma unroll
    for (int k = 0; k < 32; ++k) {
      const int64_t i = first_i + k / 16 * 8;
      const int64_t j = first_j + k % 16 / 2 * 8 + k % 2;
      if (i < p.seqlen_q && j < p.seqlen_k)
        p.keep[(batch_head * p.seqlen_q + i) * p.seqlen_k + j] = kept >> dropout_bit(i, j) & 1u;
    }
  }
}

inline void run_dropout_mask(const DropoutMaskParams& params, cudaStream_t stream) {
  const int64_t query_groups = (params.seqlen_q + 15) / 16 * 8;
  const int64_t key_groups = (params.seqlen_k + kDropoutKeys - 1) / kDropoutKeys * 4;
  const int64_t words = params.batch * params.heads_q * query_groups * key_groups;
  const int64_t ctas = std::min<int64_t>((words + kDropoutMaskThreads - 1) / kDropoutMaskThreads, INT32_MAX);
  launch("dropout_mask", dropout_mask_kernel, {grid_of(ctas), dim3(kDropoutMaskThreads)}, stream, params, query_groups,
         key_groups);
}

}  // namespace flash_ext::sm80
