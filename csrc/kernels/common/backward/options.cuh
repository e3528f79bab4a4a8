// What options make of the backward's scores: softcap, ALiBi, bias, masks and dropout, sixteen queries and a warp's 32
// keys at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/common/mask/visibility.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/warp_products.cuh"
#include "kernels/ptx/arithmetic.h"
#include "visibility.cuh"
#include "workspace.h"

namespace flash_ext {

/// What holds for all tiles of a CTA, computed once.
struct BackwardOptions : ScoreFactors {
  const float* slopes;  // ALiBi slopes, from the first head on; null = none
  bool biased, masks, hides, drops;
  uint32_t batch_head;  // word of the Philox counter, for the first head
  PhiloxKey key;

  /// `per_natural`: kPerNatural of the unit of scores.
  __device__ __forceinline__ BackwardOptions(const AttentionParams& p, const Sequence& sequence,
                                             float per_natural = BaseTwoUnit::kPerNatural)
      : ScoreFactors(of_backward(p, per_natural)),
        slopes(p.alibi_slopes ? p.alibi_slopes + sequence.batch * p.alibi_batch_stride + sequence.head : nullptr),
        biased(p.bias.data),
        masks(p.mask.data || p.blocks.offsets),
        hides(hides_pairs(p)),
        drops(p.dropout.rule.threshold > 0),
        batch_head(static_cast<uint32_t>(sequence.batch * p.heads_q + sequence.head)),
        key{} {
    if (drops) key = philox_key(p.dropout.rng[0], p.dropout.rng[1]);
  }
};

struct NoBackwardOptions {
  __device__ __forceinline__ NoBackwardOptions(const AttentionParams&, const Sequence&, float) {}
};

/// A bias tile in shared memory, as it lies in global memory: rows are queries, of kKeys elements.
template <class T, class Unit, int kKeys>
struct BiasRowsInShared {
  using Layout = TileLayout<T, kKeys>;

  /// Adds the bias to a warp's scores, which begin at (first_query, first_key) of the tile. A bias of -inf hides its
  /// pair.
  template <int kM, int kN>
  __device__ __forceinline__ static void add(float (&s)[kM][kN][4], uint32_t s_tile, int first_query, int first_key,
                                             int lane) {
    if constexpr (sizeof(T) == 2) {
      using Bias = Products<T, kKeys>;
      const uint32_t s_lane = s_tile + Bias::lane_a_transposed(lane) + first_query * Layout::kRowBytes;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        const uint32_t s_keys = at_step(s_lane, first_key / 16 + m);
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          typename Bias::A bias;  // transposed, its pairs are those of accumulators
          Bias::load_a_transposed(bias, s_keys, 0, n / 2);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float2 b = ptx::unpack2<T>(bias.r[k]);
            float* const x = s[m][n + k / 2] + k % 2 * 2;
            x[0] = fmaf(b.x, Unit::kPerNatural, x[0]);
            x[1] = fmaf(b.y, Unit::kPerNatural, x[1]);
          }
        }
      }
    } else {
      const int key = first_key + lane / 4;
#pragma unroll
      for (int k = 0; k < 2 * kM; ++k)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          // Queries 8 rows further on lie in the same column of the swizzle.
          const uint32_t s_first = s_tile + key % 4 * 4 + Layout::at(first_query + 2 * (lane % 4) + c, key / 4 + 2 * k);
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            float& x = s[k / 2][n][k % 2 * 2 + c];
            x = fmaf(load_shared<float>(s_first + 8 * n * Layout::kRowBytes), Unit::kPerNatural, x);
          }
        }
    }
  }
};

template <class Unit, int kKeys, int kN>
__device__ __forceinline__ void add_bias(float (&s)[2][kN][4], DType dtype, uint32_t s_tile, int first_query,
                                         int first_key, int lane) {
  switch (dtype) {
    case DType::kFloat16:
      return BiasRowsInShared<__half, Unit, kKeys>::add(s, s_tile, first_query, first_key, lane);
    case DType::kBFloat16:
      return BiasRowsInShared<__nv_bfloat16, Unit, kKeys>::add(s, s_tile, first_query, first_key, lane);
    default:
      return BiasRowsInShared<float, Unit, kKeys>::add(s, s_tile, first_query, first_key, lane);
  }
}

/// Starts the copies of a bias tile, by the first kThreads of the CTA, and does not wait for them. Elements beyond the
/// lengths become 0.
template <class T, int kThreads, int kRows, int kKeys>
__device__ __forceinline__ void copy_bias(uint32_t s_tile, const T* g_head, int64_t row_stride,
                                          const Sequence& sequence, int first_query, int first_key) {
  using Layout = TileLayout<T, kKeys>;
  constexpr int kChunks = Layout::kChunks, kStep = kThreads / kChunks;
  const int chunk = threadIdx.x % kChunks, thread_row = threadIdx.x / kChunks;
  const int column = first_key + chunk * Layout::kChunkElements;
  const int bytes = min(max(sequence.seqlen_k - column, 0) * static_cast<int>(sizeof(T)), 16);
  const int rows = bytes > 0 ? sequence.seqlen_q - first_query : 0;
  const T* g_chunk = g_head + (first_query + thread_row) * row_stride + column;
#pragma unroll 1
  for (int row = thread_row; row < kRows; row += kStep, g_chunk += kStep * row_stride)
    ptx::cp_async_16_of(s_tile + Layout::at(row, chunk), row < rows ? g_chunk : g_head, row < rows ? bytes : 0);
}

/// Loads a bias tile element by element, where 16-byte copies are impossible: other strides, or double, which is stored
/// as float.
template <class T, class Kept, int kThreads, int kRows, int kKeys>
__device__ __forceinline__ void load_bias_elements(uint32_t s_tile, const T* g_head, const ScoreView& bias,
                                                   const Sequence& sequence, int first_query, int first_key) {
  using Layout = TileLayout<Kept, kKeys>;
#pragma unroll 1
  for (int flat = threadIdx.x; flat < kRows * kKeys; flat += kThreads) {
    const int row = flat / kKeys, column = flat % kKeys, i = first_query + row, j = first_key + column;
    const bool inside = i < sequence.seqlen_q && j < sequence.seqlen_k;
    const T value = inside ? g_head[i * bias.row_stride + j * bias.col_stride] : T();
    store_shared(s_tile + Layout::at(row, column / Layout::kChunkElements) +
                     column % Layout::kChunkElements * static_cast<int>(sizeof(Kept)),
                 static_cast<Kept>(value));
  }
}

/// Loads a bias tile into shared memory.
template <int kThreads, int kRows, int kKeys>
__device__ __forceinline__ void load_bias(uint32_t s_tile, const ScoreView& bias, bool by_copies,
                                          const Sequence& sequence, int first_query, int first_key) {
  const auto load = [&](auto type, auto kept) {
    using T = decltype(type);
    const T* const g_head =
        static_cast<const T*>(bias.data) + sequence.batch * bias.batch_stride + sequence.head * bias.head_stride;
    if (sizeof(T) < 8 && by_copies) {
      copy_bias<T, kThreads, kRows, kKeys>(s_tile, g_head, bias.row_stride, sequence, first_query, first_key);
    } else {
      load_bias_elements<T, decltype(kept), kThreads, kRows, kKeys>(s_tile, g_head, bias, sequence, first_query,
                                                                    first_key);
    }
  };
  switch (bias.dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return load(uint16_t(), uint16_t());
    case DType::kFloat32:
      return load(float(), float());
    case DType::kFloat64:
      return load(double(), float());
  }
}

/// Sets the exponents of pairs that a mask hides to -inf. s_words: the word of the lane's first query, followed by the
/// words of the next queries.
template <int kN>
__device__ __forceinline__ void hide_by_words(float (&exponents)[2][kN][4], uint32_t s_words, int lane) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint2 words = load_shared<uint2>(s_words + 32 * n);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t word = (c ? words.y : words.x) >> (lane / 4);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (!(word >> (16 * m + 8 * r) & 1u)) exponents[m][n][2 * r + c] = -INFINITY;
    }
  }
}

/// Multiplies two pairs of 16-bit numbers.
template <class Element>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
  const Pair product = __hmul2(reinterpret_cast<const Pair&>(x), reinterpret_cast<const Pair&>(y));
  return reinterpret_cast<const uint32_t&>(product);
}

}  // namespace flash_ext
