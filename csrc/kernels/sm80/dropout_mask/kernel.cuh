// Which scores dropout keeps, written out as booleans: the mask that the attention kernels draw on the fly.
//
// A thread makes one Philox call at a time and writes the eight scores that it decides (common/dropout/philox.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/dropout/philox.h"
#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int64_t kDropoutMaskThreads = 256;

/// Draws along a sequence: 8 per group of positions, whose other members share them.
inline int64_t dropout_bits_along(int64_t seqlen, int64_t group) { return (seqlen + group - 1) / group * 8; }

/// One thread per draw, which decides the queries {i, i + 8} of 16 and the keys {j, j + 8, j + 16, j + 24} of 32.
static __global__ void __launch_bounds__(kDropoutMaskThreads)
    dropout_mask_kernel(const __grid_constant__ DropoutMaskParams p, uint32_t threshold, int64_t query_groups,
                        int64_t key_groups) {
  const PhiloxKey key = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  const int64_t random_bits = p.batch * p.heads_q * query_groups * key_groups;
  const int64_t stride = gridDim.x * kDropoutMaskThreads;
  for (int64_t draw = blockIdx.x * kDropoutMaskThreads + threadIdx.x; draw < random_bits; draw += stride) {
    const int64_t key_group = draw % key_groups;
    const int64_t query_group = draw / key_groups % query_groups;
    const int64_t batch_head = draw / key_groups / query_groups;
    const int64_t first_i = (query_group >> 3) * 16 + (query_group & 7);
    const int64_t first_j = (key_group >> 3) * 32 + (key_group & 7);
    const PhiloxWords words = dropout_words(key, batch_head, first_i, first_j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const int64_t i = first_i + 8 * half;
        const int64_t j = first_j + 8 * word;
        if (i < p.seqlen_q && j < p.seqlen_k) {
          p.keep[(batch_head * p.seqlen_q + i) * p.seqlen_k + j] = dropout_bits(words, i, j) >= threshold;
        }
      }
    }
  }
}

inline void run_dropout_mask(const DropoutMaskParams& params, cudaStream_t stream) {
  const int64_t query_groups = dropout_bits_along(params.seqlen_q, 16);
  const int64_t key_groups = dropout_bits_along(params.seqlen_k, 32);
  const int64_t random_bits = params.batch * params.heads_q * query_groups * key_groups;
  const int64_t blocks = std::min<int64_t>((random_bits + kDropoutMaskThreads - 1) / kDropoutMaskThreads, INT32_MAX);
  launch("dropout_mask", dropout_mask_kernel, {grid_of(blocks), dim3(kDropoutMaskThreads)}, stream, params,
         dropout_threshold(params.dropout.p), query_groups, key_groups);
}

}  // namespace flash_ext::sm80
