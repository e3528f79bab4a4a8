// Merging of partial results over disjoint sets of keys, s = 1 .. splits:
//
//   lse = log sum_s exp(lse_s)         w_s = exp(lse_s - lse)         out = sum_s w_s out_s
//   grad_out_s = w_s grad_out          grad_lse_s = w_s (grad_out . (out_s - out) + grad_lse)
//
// A warp owns one row (batch, position, head): its lanes share the splits for lse and head_dim for out. A part that saw
// no key has lse_s = -inf; its out_s is never read, since it may hold anything.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int kMergeWarpSize = 32;
constexpr int kMergeWarps = 4;

/// kVec neighbours along head_dim, moved by one instruction.
template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Pack {
  T value[kVec];
};

struct MergeRow {
  int64_t batch, position, head;
};

__device__ __forceinline__ MergeRow merge_row(const MergeParams& p, int64_t flat) {
  const int64_t token = flat / p.heads;
  return {token / p.seqlen, token % p.seqlen, flat % p.heads};
}

template <class T>
__device__ __forceinline__ T* row_address(const TensorView& view, const MergeRow& row) {
  return static_cast<T*>(view.data) + row.batch * view.batch_stride + row.position * view.row_stride +
         row.head * view.head_stride;
}

__device__ __forceinline__ float* row_address(const LseView& view, const MergeRow& row) {
  return static_cast<float*>(view.data) + row.batch * view.batch_stride + row.head * view.head_stride + row.position;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = kMergeWarpSize / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = kMergeWarpSize / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

/// exp(part - total), 0 where the part saw nothing: then total may be -inf too, and their difference NaN.
__device__ __forceinline__ float merge_weight(float part, float total) {
  return part == -INFINITY ? 0.0f : expf(part - total);
}

/// log sum exp of `splits` numbers, -inf when all are; NaN if any is.
__device__ __forceinline__ float merged_lse(const float* lses, int64_t split_stride, int64_t splits, int lane) {
  float largest = -INFINITY;
  for (int64_t s = lane; s < splits; s += kMergeWarpSize) largest = fmaxf(largest, lses[s * split_stride]);
  largest = warp_max(largest);
  const float shift = largest == -INFINITY ? 0.0f : largest;
  float sum = 0.0f;
  for (int64_t s = lane; s < splits; s += kMergeWarpSize) sum += expf(lses[s * split_stride] - shift);
  return shift + logf(warp_sum(sum));
}

template <class T, int kVec>
__device__ __forceinline__ void merge_one_row(const MergeParams& p, const MergeRow& row, int lane) {
  const T* outs = row_address<T>(p.outs, row);
  const float* lses = row_address(p.lses, row);
  const float lse = merged_lse(lses, p.lses_split_stride, p.splits, lane);
  if (lane == 0) *row_address(p.lse, row) = lse;

  T* out = row_address<T>(p.out, row);
  for (int64_t d = lane * kVec; d < p.head_dim; d += kMergeWarpSize * kVec) {
    float sum[kVec] = {};
    for (int64_t s = 0; s < p.splits; ++s) {
      const float weight = merge_weight(lses[s * p.lses_split_stride], lse);
      if (weight == 0.0f) continue;
      const auto part = *reinterpret_cast<const Pack<T, kVec>*>(outs + s * p.outs_split_stride + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) sum[e] += weight * static_cast<float>(part.value[e]);
    }
    Pack<T, kVec> result;
#pragma unroll
    for (int e = 0; e < kVec; ++e) result.value[e] = static_cast<T>(sum[e]);
    *reinterpret_cast<Pack<T, kVec>*>(out + d) = result;
  }
}

/// Writes weight * grad_out to grad_part and returns this lane's share of grad_out . (part - out).
template <class T, int kVec>
__device__ __forceinline__ float merge_backward_part(const T* grad_out, const T* out, const T* part, T* grad_part,
                                                     float weight, int64_t head_dim, int lane) {
  float dot = 0.0f;
  for (int64_t d = lane * kVec; d < head_dim; d += kMergeWarpSize * kVec) {
    Pack<T, kVec> gradient;
    if (weight == 0.0f || grad_out == nullptr) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) gradient.value[e] = static_cast<T>(0.0f);
    } else {
      gradient = *reinterpret_cast<const Pack<T, kVec>*>(grad_out + d);
      const auto mine = *reinterpret_cast<const Pack<T, kVec>*>(part + d);
      const auto merged = *reinterpret_cast<const Pack<T, kVec>*>(out + d);
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        const float g = static_cast<float>(gradient.value[e]);
        dot += g * (static_cast<float>(mine.value[e]) - static_cast<float>(merged.value[e]));
        gradient.value[e] = static_cast<T>(weight * g);
      }
    }
    *reinterpret_cast<Pack<T, kVec>*>(grad_part + d) = gradient;
  }
  return dot;
}

template <class T, int kVec>
__device__ __forceinline__ void merge_backward_one_row(const MergeBackwardParams& p, const MergeRow& row, int lane) {
  const T* outs = row_address<T>(p.outs, row);
  const T* out = row_address<T>(p.out, row);
  const T* grad_out = p.grad_out.data == nullptr ? nullptr : row_address<T>(p.grad_out, row);
  T* grad_outs = row_address<T>(p.grad_outs, row);
  const float* lses = row_address(p.lses, row);
  float* grad_lses = row_address(p.grad_lses, row);
  const float lse = *row_address(p.lse, row);
  const float grad_lse = p.grad_lse.data == nullptr ? 0.0f : *row_address(p.grad_lse, row);

  for (int64_t s = 0; s < p.splits; ++s) {
    const float weight = merge_weight(lses[s * p.lses_split_stride], lse);
    const float dot =
        warp_sum(merge_backward_part<T, kVec>(grad_out, out, outs + s * p.outs_split_stride,
                                              grad_outs + s * p.grad_outs_split_stride, weight, p.head_dim, lane));
    // A weight of 0 settles the gradient even where grad_lse is not finite.
    if (lane == 0) grad_lses[s * p.grad_lses_split_stride] = weight == 0.0f ? 0.0f : weight * (dot + grad_lse);
  }
}

template <class Params, class Body>
__device__ __forceinline__ void for_each_merge_row(const Params& p, Body body) {
  const int64_t rows = p.batch * p.seqlen * p.heads;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kMergeWarps;
  const int lane = threadIdx.x % kMergeWarpSize;
  for (int64_t flat = static_cast<int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / kMergeWarpSize; flat < rows;
       flat += stride) {
    body(merge_row(p, flat), lane);
  }
}

template <class T, int kVec>
__global__ void __launch_bounds__(kMergeWarps* kMergeWarpSize) merge_kernel(const __grid_constant__ MergeParams p) {
  for_each_merge_row(p, [&](const MergeRow& row, int lane) { merge_one_row<T, kVec>(p, row, lane); });
}

template <class T, int kVec>
__global__ void __launch_bounds__(kMergeWarps* kMergeWarpSize)
    merge_backward_kernel(const __grid_constant__ MergeBackwardParams p) {
  for_each_merge_row(p, [&](const MergeRow& row, int lane) { merge_backward_one_row<T, kVec>(p, row, lane); });
}

/// Whether every row of these views starts at a multiple of 16 bytes. An absent view does.
template <class T>
bool rows_are_aligned(std::initializer_list<TensorView> views) {
  constexpr int64_t kVec = 16 / sizeof(T);
  return std::all_of(views.begin(), views.end(), [](const TensorView& view) {
    const int64_t strides = view.batch_stride | view.row_stride | view.head_stride;
    return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && strides % kVec == 0;
  });
}

inline LaunchShape merge_launch_shape(const MergeParams& p) {
  constexpr int64_t kMaxCtas = INT32_MAX;
  const int64_t rows = p.batch * p.seqlen * p.heads;
  const int64_t ctas = std::min((rows + kMergeWarps - 1) / kMergeWarps, kMaxCtas);
  return {grid_of(ctas), dim3(kMergeWarps * kMergeWarpSize)};
}

template <class T>
void run_merge(const MergeParams& p, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const bool aligned =
      rows_are_aligned<T>({p.outs, p.out}) && p.outs_split_stride % kVec == 0 && p.head_dim % kVec == 0;
  const auto kernel = aligned ? merge_kernel<T, kVec> : merge_kernel<T, 1>;
  launch("merge", kernel, merge_launch_shape(p), stream, p);
}

template <class T>
void run_merge_backward(const MergeBackwardParams& p, cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  const int64_t splits = p.outs_split_stride | p.grad_outs_split_stride;
  const bool aligned =
      rows_are_aligned<T>({p.outs, p.out, p.grad_out, p.grad_outs}) && splits % kVec == 0 && p.head_dim % kVec == 0;
  const auto kernel = aligned ? merge_backward_kernel<T, kVec> : merge_backward_kernel<T, 1>;
  launch("merge_backward", kernel, merge_launch_shape(p), stream, p);
}

}  // namespace flash_ext::sm80
