// The kernel that packs a boolean mask into bits (mask_bits.h).
#pragma once

#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/launch.h"
#include "mask_bits.h"

namespace flash_ext::sm80 {

constexpr int kMaskBitsThreads = 256;

/// A warp packs a unit of 32 queries and 32 keys; each lane reads a row of it. Rows past the last query count as rows
/// that see all keys. So they get a stabiliser, and the forward need not treat them as rows that have seen no key yet.
static __global__ void __launch_bounds__(kMaskBitsThreads)
    mask_bits_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ MaskSizes sizes,
                     const __grid_constant__ MaskBits to) {
  const int64_t unit = (static_cast<int64_t>(blockIdx.x) * kMaskBitsThreads + threadIdx.x) / 32;
  if (unit >= sizes.units()) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row_unit = unit / sizes.key_units % sizes.row_units, head = unit / sizes.key_units / sizes.row_units;
  const int first_key = static_cast<int>(unit % sizes.key_units) * kMaskKeys;
  const int64_t i = p.mask.row_stride == 0 ? 0 : row_unit * kMaskRows + lane;
  const int seqlen_k = static_cast<int>(p.seqlen_k);
  uint32_t word = ~0u;
  bool shows = false;
  if (i < p.seqlen_q) {
    const Sequence sequence(p, static_cast<int>(head / sizes.heads), static_cast<int>(head % sizes.heads));
    word = mask_word(MaskRows(p.mask, sequence), static_cast<int>(i), first_key, seqlen_k);
    shows = word != 0;
  }
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) bits |= QuadOrder::part(__shfl_sync(~0u, word, 8 * k + lane / 4), lane % 4) << 8 * k;
  to.words[unit * kMaskRows + lane] = bits;
  const bool any = __any_sync(~0u, shows);
  if (lane == 0) to.states[unit] = any ? kMaskShows : kMaskHides;
}

inline MaskBits make_mask_bits(const AttentionParams& p, void* memory, cudaStream_t stream) {
  const MaskSizes sizes(p);
  const MaskBits bits = sizes.views(memory);
  constexpr int64_t kUnitsOfCta = kMaskBitsThreads / 32;
  const dim3 ctas = grid_of((sizes.units() + kUnitsOfCta - 1) / kUnitsOfCta);
  launch("sm80/mask_bits", mask_bits_kernel, {ctas, dim3(kMaskBitsThreads)}, stream, p, sizes, bits);
  return bits;
}

}  // namespace flash_ext::sm80
