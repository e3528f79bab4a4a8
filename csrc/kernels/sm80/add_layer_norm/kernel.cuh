// The sum of two rows and its layer norm (Ba et al. 2016):
//
//   s = round(x + residual)     out = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias
//
// Both inputs are read once and s stays in registers: a row belongs to as many warps as it takes to give each lane at
// most kNormVectors vectors of 16 bytes. A lane issues all of its loads before it uses the first. The variance is that
// of the distances to a first mean, corrected by their own mean: the first mean of large numbers is a rounded sum.
//
// Rows that are too wide for a CTA, or do not consist of aligned vectors, take the kernel at the end: a warp reads its
// row three times, the second and third time from the cache.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "kernels/launch.h"
#include "kernels/params.h"

namespace flash_ext::sm80 {

constexpr int kNormWarp = 32;
constexpr int kNormThreads = 128;     // of a CTA, as long as a row does not need more
constexpr int kNormMaxThreads = 512;  // of a row
constexpr int kNormVectors = 4;       // of a lane

/// A vector of 16 bytes, which one instruction loads.
template <class T>
struct alignas(16) NormVector {
  static constexpr int kSize = 16 / sizeof(T);
  T value[kSize];
};

template <class T>
__device__ __forceinline__ NormVector<T> load_vector(const void* row, int64_t vector) {
  return static_cast<const NormVector<T>*>(row)[vector];
}

/// Sums over the threads of a row, which are whole warps of one CTA; `partial` has room for one number a warp.
__device__ __forceinline__ float row_sum(float x, int row_threads, float* partial) {
#pragma unroll
  for (int lanes = kNormWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  if (row_threads == kNormWarp) return x;
  const int warp = threadIdx.x / kNormWarp, warps = row_threads / kNormWarp;
  if (threadIdx.x % kNormWarp == 0) partial[warp] = x;
  __syncthreads();
  x = 0.0f;
  for (int w = 0; w < warps; ++w) x += partial[warp / warps * warps + w];
  __syncthreads();  // before the next sum overwrites what others still read
  return x;
}

struct NormMoments {
  float mean;
  float scale;  // 1 / sqrt(variance + eps)
};

/// Computes moments from the sums of distances to a first mean, and of their squares.
__device__ __forceinline__ NormMoments moments(const AddLayerNormParams& p, float mean, float distances,
                                               float squares) {
  const float width = static_cast<float>(p.width);
  const float correction = distances / width;
  const float variance = fmaxf(squares / width - correction * correction, 0.0f);
  return {mean + correction, rsqrtf(variance + static_cast<float>(p.eps))};
}

/// Serves rows of whole vectors, at most kNormVectors for each of row_threads threads.
template <class T>
__global__ void __launch_bounds__(kNormMaxThreads, 1)
    add_layer_norm_kernel(const __grid_constant__ AddLayerNormParams p, int row_threads) {
  using Vector = NormVector<T>;
  __shared__ float partial[kNormMaxThreads / kNormWarp];
  const int rows_of_cta = blockDim.x / row_threads;
  const int lane = threadIdx.x % row_threads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_cta + threadIdx.x / row_threads;
  const bool exists = row < p.rows;  // the threads of a row that does not exist still meet the others' barriers
  const int num_vectors = static_cast<int>(p.width / Vector::kSize);
  const auto row_of = [&](const void* data) { return static_cast<const T*>(data) + row * p.width; };

  Vector x[kNormVectors], residual[kNormVectors];
#pragma unroll
  for (int n = 0; n < kNormVectors; ++n) {
    const int vector = n * row_threads + lane;
    if (exists && vector < num_vectors) {
      x[n] = load_vector<T>(row_of(p.x), vector);
      residual[n] = load_vector<T>(row_of(p.residual), vector);
    }
  }

  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kNormVectors; ++n) {
    const int vector = n * row_threads + lane;
    if (!exists || vector >= num_vectors) continue;
#pragma unroll
    for (int e = 0; e < Vector::kSize; ++e) {
      x[n].value[e] = static_cast<T>(static_cast<float>(x[n].value[e]) + static_cast<float>(residual[n].value[e]));
      sum += static_cast<float>(x[n].value[e]);
    }
    if (p.sum != nullptr) reinterpret_cast<Vector*>(static_cast<T*>(p.sum) + row * p.width)[vector] = x[n];
  }
  const float mean = row_sum(sum, row_threads, partial) / static_cast<float>(p.width);

  float distances = 0.0f, squares = 0.0f;
#pragma unroll
  for (int n = 0; n < kNormVectors; ++n) {
    if (!exists || n * row_threads + lane >= num_vectors) continue;
#pragma unroll
    for (int e = 0; e < Vector::kSize; ++e) {
      const float distance = static_cast<float>(x[n].value[e]) - mean;
      distances += distance;
      squares += distance * distance;
    }
  }
  distances = row_sum(distances, row_threads, partial);
  const NormMoments norm = moments(p, mean, distances, row_sum(squares, row_threads, partial));

#pragma unroll
  for (int n = 0; n < kNormVectors; ++n) {
    const int vector = n * row_threads + lane;
    if (!exists || vector >= num_vectors) continue;
    Vector weight, bias, out;
    if (p.weight != nullptr) weight = load_vector<T>(p.weight, vector);
    if (p.bias != nullptr) bias = load_vector<T>(p.bias, vector);
#pragma unroll
    for (int e = 0; e < Vector::kSize; ++e) {
      float value = (static_cast<float>(x[n].value[e]) - norm.mean) * norm.scale;
      if (p.weight != nullptr) value *= static_cast<float>(weight.value[e]);
      if (p.bias != nullptr) value += static_cast<float>(bias.value[e]);
      out.value[e] = static_cast<T>(value);
    }
    reinterpret_cast<Vector*>(static_cast<T*>(p.out) + row * p.width)[vector] = out;
  }
}

/// Serves any rows: a warp for each, element by element.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    add_layer_norm_any_kernel(const __grid_constant__ AddLayerNormParams p) {
  const int lane = threadIdx.x % kNormWarp;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kNormThreads + threadIdx.x) / kNormWarp;
  if (row >= p.rows) return;
  const T* x = static_cast<const T*>(p.x) + row * p.width;
  const T* residual = static_cast<const T*>(p.residual) + row * p.width;
  const auto element = [&](int64_t d) {
    return static_cast<T>(static_cast<float>(x[d]) + static_cast<float>(residual[d]));
  };

  float sum = 0.0f;
  for (int64_t d = lane; d < p.width; d += kNormWarp) sum += static_cast<float>(element(d));
  const float mean = row_sum(sum, kNormWarp, nullptr) / static_cast<float>(p.width);
  float distances = 0.0f, squares = 0.0f;
  for (int64_t d = lane; d < p.width; d += kNormWarp) {
    const float distance = static_cast<float>(element(d)) - mean;
    distances += distance;
    squares += distance * distance;
  }
  distances = row_sum(distances, kNormWarp, nullptr);
  const NormMoments norm = moments(p, mean, distances, row_sum(squares, kNormWarp, nullptr));

  for (int64_t d = lane; d < p.width; d += kNormWarp) {
    const T s = element(d);
    float value = (static_cast<float>(s) - norm.mean) * norm.scale;
    if (p.weight != nullptr) value *= static_cast<float>(static_cast<const T*>(p.weight)[d]);
    if (p.bias != nullptr) value += static_cast<float>(static_cast<const T*>(p.bias)[d]);
    if (p.sum != nullptr) static_cast<T*>(p.sum)[row * p.width + d] = s;
    static_cast<T*>(p.out)[row * p.width + d] = static_cast<T>(value);
  }
}

inline int64_t norm_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
bool is_of_vectors(const AddLayerNormParams& p) {
  const void* const rows[] = {p.x, p.residual, p.weight, p.bias, p.sum, p.out};
  return p.width % NormVector<T>::kSize == 0 && std::all_of(std::begin(rows), std::end(rows), [](const void* data) {
           return reinterpret_cast<uintptr_t>(data) % 16 == 0;
         });
}

template <class T>
void run_add_layer_norm(const AddLayerNormParams& p, cudaStream_t stream) {
  const int64_t lanes = norm_ceil_div(p.width, NormVector<T>::kSize * kNormVectors);
  const int64_t row_threads = norm_ceil_div(lanes, kNormWarp) * kNormWarp;
  if (!is_of_vectors<T>(p) || row_threads > kNormMaxThreads) {
    const int64_t rows_of_cta = kNormThreads / kNormWarp;
    const LaunchShape shape{dim3(grid_size(norm_ceil_div(p.rows, rows_of_cta))), dim3(kNormThreads)};
    launch("add_layer_norm", add_layer_norm_any_kernel<T>, shape, stream, p);
    return;
  }
  const int64_t rows_of_cta = std::max<int64_t>(1, kNormThreads / row_threads);
  const LaunchShape shape{dim3(grid_size(norm_ceil_div(p.rows, rows_of_cta))),
                          dim3(static_cast<unsigned>(rows_of_cta * row_threads))};
  launch("add_layer_norm", add_layer_norm_kernel<T>, shape, stream, p, static_cast<int>(row_threads));
}

}  // namespace flash_ext::sm80
