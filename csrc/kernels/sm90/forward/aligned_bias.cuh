// TMA reads a bias whose rows consist of 16-byte chunks. Any other bias is copied to such rows before the forward runs.
// Broadcast dimensions stay broadcast, except that of the keys: the copy of a bias that is the same for all keys has 64
// keys. They are one part of a tile, which the producer loads for every tile.
#pragma once

#include "kernels/common/score/bias_tile.cuh"
#include "kernels/launch.h"
#include "kernels/params.h"
#include "kernels/sm90/common/matrix_descriptor.h"

namespace flash_ext::sm90 {

constexpr int kBiasCopyThreads = 256;

FLASH_EXT_HOST_DEVICE bool same_for_all_keys(const ScoreView& bias) { return bias.col_stride == 0; }

inline bool must_align_bias(const ScoreView& bias) { return bias.data && !can_stage_bias(bias); }

/// The copy of a bias of 16 bits.
struct AlignedBias {
  ScoreView view;
  int64_t batch, heads, rows, columns;  // sizes of the copy; 1 where the bias is broadcast, but 64 columns
  int64_t bytes = 0;

  AlignedBias(const AttentionParams& p, void* memory) {
    const ScoreView& bias = p.bias;
    const auto distinct = [](int64_t size, int64_t stride) { return stride == 0 ? 1 : size; };
    const auto stride = [](int64_t size, int64_t elements) { return size > 1 ? elements : 0; };
    batch = distinct(p.batch, bias.batch_stride), heads = distinct(p.heads_q, bias.head_stride);
    rows = distinct(p.seqlen_q, bias.row_stride),
    columns = same_for_all_keys(bias) ? kPanelColumns : (p.seqlen_k + 7) / 8 * 8;
    view.dtype = bias.dtype;
    view.data = memory;
    view.col_stride = same_for_all_keys(bias) ? 0 : 1;
    view.row_stride = stride(rows, columns);
    view.head_stride = stride(heads, rows * columns);
    view.batch_stride = stride(batch, heads * rows * columns);
    if (must_align_bias(bias)) bytes = batch * heads * rows * columns * static_cast<int64_t>(sizeof(uint16_t));
  }
};

static __global__ void __launch_bounds__(kBiasCopyThreads)
    align_bias_kernel(const __grid_constant__ ScoreView from, const __grid_constant__ AlignedBias to,
                      int64_t seqlen_k) {
  const int64_t count = to.batch * to.heads * to.rows * to.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kBiasCopyThreads;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kBiasCopyThreads + threadIdx.x; at < count; at += step) {
    const int64_t key = at % to.columns, row = at / to.columns;
    const int64_t query = row % to.rows, head = row / to.rows % to.heads, batch = row / to.rows / to.heads;
    if (key >= seqlen_k && !same_for_all_keys(from)) continue;
    static_cast<uint16_t*>(to.view.data)[at] =
        static_cast<const uint16_t*>(from.data)[batch * from.batch_stride + head * from.head_stride +
                                                query * from.row_stride + key * from.col_stride];
  }
}

/// Returns the bias for the forward: the original, or a copy in `memory` of AlignedBias::bytes.
inline ScoreView align_bias(const AttentionParams& p, void* memory, cudaStream_t stream) {
  if (!must_align_bias(p.bias)) return p.bias;
  constexpr int64_t kMostBlocks = 1 << 20;
  const AlignedBias to(p, memory);
  const int64_t count = to.batch * to.heads * to.rows * to.columns;
  const dim3 grid = grid_of(std::min((count + kBiasCopyThreads - 1) / kBiasCopyThreads, kMostBlocks));
  launch("sm90/align_bias", align_bias_kernel, {grid, dim3(kBiasCopyThreads)}, stream, p.bias, to, p.seqlen_k);
  return to.view;
}

}  // namespace flash_ext::sm90
