// The end of a CTA of decoding: combines the results that its warps left in shared memory, and stores the result of the
// tile or of a split.
#pragma once

#include "kernels/common/score/scores.cuh"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

/// Adds to rows of out the non-finite values that they see among keys that other rows do not see: sanitising removed
/// these values from the products. Slow and rare. The whole CTA calls it, between barriers.
template <class Config>
__device__ __forceinline__ void add_non_finite(float* s_out, const ForwardParams& p, const DecodeGrid& grid,
                                               const DecodeTile& tile, int split) {
  using Element = typename Config::Element;
  const Sequence& sequence = tile.sequence;
  const auto values = key_rows<const Element, true>(p, p.v, sequence);
#pragma unroll 1
  for (int column = threadIdx.x; column < p.head_dim_v; column += Config::kThreads) {
#pragma unroll 1
    for (int j = tile.split_begin(split); j < tile.split_end(split); ++j) {
      // Mixed key tiles reach into keys that all rows see. Adding a value that was not taken out changes nothing.
      if (j >= tile.common_begin(grid) + Config::kBlockN && j < tile.common_end(grid) - Config::kBlockN) continue;
      const float value = static_cast<float>(values.row(j)[column]);
      if (isfinite(value)) continue;
#pragma unroll 1
      for (int slot = 0; slot < Config::kKeyWarps * Config::kBlockM; ++slot) {
        const int row = slot % Config::kBlockM, i = static_cast<int>(grid.group.quotient(tile.first_row + row));
        if (row >= tile.rows || j < sequence.keys_begin(i) || j >= sequence.keys_end(i)) continue;
        s_out[slot * Config::kOutStride + column] += value;
      }
    }
  }
}

/// Adds up what the warps published, and writes the result of the tile or, where it is split, that of this split.
template <class Config>
__device__ __forceinline__ void finish(const float* s_out, const float2* s_softmax_state, const ForwardParams& p,
                                       const DecodeGrid& grid, const DecodePartials& partials, const DecodeTile& tile,
                                       int split) {
  using Element = typename Config::Element;
  using Unit = ScoreUnit<Element>;
  constexpr int kColumns = 8;
  const int eights = static_cast<int>(p.head_dim_v) / kColumns;
#pragma unroll 1
  for (int flat = threadIdx.x; flat < tile.rows * eights; flat += Config::kThreads) {
    const int row = flat / eights, column = flat % eights * kColumns;
    float maximum = s_softmax_state[row].x;
#pragma unroll
    for (int w = 1; w < Config::kKeyWarps; ++w) maximum = fmaxf(maximum, s_softmax_state[w * Config::kBlockM + row].x);
    const float stabiliser = maximum == -INFINITY ? 0.0f : maximum;
    float sum = 0.0f, values[kColumns] = {};
#pragma unroll
    for (int w = 0; w < Config::kKeyWarps; ++w) {
      const int slot = w * Config::kBlockM + row;
      const float2 state = s_softmax_state[slot];
      const float factor = Unit::exp(state.x - stabiliser);
      sum += state.y * factor;
      if (factor == 0.0f) continue;
      const float4* s_values = reinterpret_cast<const float4*>(s_out + slot * Config::kOutStride + column);
      const float4 low = s_values[0], high = s_values[1];
      const float parts[kColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) values[c] += factor * parts[c];
    }
    if (tile.is_split()) {
      const int64_t part = tile.partial_row(grid, split, row);
      if (column == 0) partials.lse[part] = sum == 0.0f ? -INFINITY : stabiliser + Unit::log(sum);
      store_eight(partials.out + part * p.head_dim_v + column, values, sum == 0.0f ? 0.0f : __fdividef(1.0f, sum));
    } else {
      const DecodeRow<Element> target(p, grid, tile.sequence, tile.first_row + row);
      const RowEnd end = finish_row<Unit>(stabiliser, sum, sink_of(p, target.head));
      if (column == 0) *target.lse = end.lse;
      store_eight(target.out + column, values, end.scale);
    }
  }
}

/// Writes the results of rows without keys: out 0, lse -inf.
template <class Config>
__device__ __forceinline__ void write_nothing(const ForwardParams& p, const DecodeGrid& grid, const DecodeTile& tile) {
  constexpr int kColumns = 8;
  const float zeros[kColumns] = {};
  const int eights = static_cast<int>(p.head_dim_v) / kColumns;
#pragma unroll 1
  for (int flat = threadIdx.x; flat < tile.rows * eights; flat += Config::kThreads) {
    const DecodeRow<typename Config::Element> target(p, grid, tile.sequence, tile.first_row + flat / eights);
    if (flat % eights == 0) *target.lse = -INFINITY;
    store_eight(target.out + flat % eights * kColumns, zeros, 1.0f);
  }
}

}  // namespace flash_ext::sm80
