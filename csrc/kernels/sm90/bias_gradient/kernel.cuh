// The gradient of an additive bias on wgmma: dS, summed over the dimensions in which the bias is broadcast.
//
//   dS = P * (dP - delta)    P = 2^(S - lse),  S = Q K^T,  dP = dO V^T,  delta: common/bias_gradient/row_terms.cuh
//
// A CTA owns a tile of dbias, 128 queries x 128 keys. It recomputes dS of its score tiles, which are all tiles of
// scores that fall on it, in a fixed order. CTAs go through work tiles. A work tile is a tile of dbias or, where dbias
// has few tiles, a chunk of its sum; a second kernel adds up the chunks.
//
// Warpgroups 1 and 2 are consumers of 64 queries each. They hold sum, S and dP in registers, and compute P while dP is
// multiplied. Warpgroup 0 has the producers:
//   warp 0 loads slabs of 64 columns through TMA: for each score tile slabs of Q and K, then of dO and V;
//   warps 1 to 3 find the score tiles with a visible pair, every third each, and load the row terms.
// All score tiles of a work tile share a bias tile. Each consumer warp copies its own part of it, a work tile ahead.
//
//   step_full, step_empty     a slot holds a score tile, or the end of a work tile; all warps have read it
//   slab_full, slab_empty     a stage holds slabs; the consumer warps have multiplied them
#pragma once

#include <algorithm>

#include "consumer.cuh"
#include "kernels/common/bias_gradient/row_terms.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/launch.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/ptx/shared_address.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    bias_gradient_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasMaps maps,
                         const __grid_constant__ BiasWorkTiles work_tiles, const float* delta) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BiasStorage<Config>*>(shared + Config::kSlabsBytes);
  const uint32_t s_slabs = ptx::shared_address(shared);
  const uint32_t s_bias = s_slabs + Config::kSlabsBytes + BiasStorage<Config>::bytes();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) storage.init();
  __syncthreads();
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kProducerRegisters>();
    BiasProducer<Config> producer(p, maps, work_tiles, storage, s_slabs, lane);
    if (warp == 0) producer.load_slabs();
    if (warp > 0) producer.find_steps(delta, static_cast<uint32_t>(warp - 1));
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    BiasConsumer<Config>(p, work_tiles, storage, s_slabs, s_bias, warp - kWarpgroupWarps, lane).run();
  }
}

/// Sums the shares of all chunks into dbias. A thread per element.
static __global__ void __launch_bounds__(256)
    bias_shares_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BiasWorkTiles work_tiles,
                       int shares) {
  const ScoreView& d = p.dbias;
  const int64_t keys = p.seqlen_k, rows = d.row_stride == 0 ? 1 : p.seqlen_q;
  const int64_t total = work_tiles.tiles.batches * work_tiles.tiles.heads * rows * keys;
  for (int64_t n = int64_t{blockIdx.x} * 256 + threadIdx.x; n < total; n += int64_t{gridDim.x} * 256) {
    float sum = 0.0f;
    for (int share = 0; share < shares; ++share) sum += work_tiles.shares[share * total + n];
    const int64_t row = n / keys, head = row / rows;
    const int64_t at = head / work_tiles.tiles.heads * d.batch_stride + head % work_tiles.tiles.heads * d.head_stride +
                       row % rows * d.row_stride + n % keys;
    switch (d.dtype) {
      case DType::kFloat16:
        static_cast<__half*>(d.data)[at] = __float2half(sum);
        break;
      case DType::kBFloat16:
        static_cast<__nv_bfloat16*>(d.data)[at] = __float2bfloat16(sum);
        break;
      default:
        static_cast<float*>(d.data)[at] = sum;
    }
  }
}

template <class Element>
inline BiasTiles bias_tiles(const BackwardParams& p) {
  using Config = BiasConfig<Element, 64>;
  constexpr int64_t kWantedWorkTiles = 528;  // four for each SM
  return {p, Config::kRows, Config::kKeys, kWantedWorkTiles};
}

/// The parts of the scratch memory: delta of each row, and the shares of chunks.
struct BiasMemory {
  float *delta, *shares;
  int num_shares;
  int64_t bytes;

  BiasMemory(const BackwardParams& p, const BiasTiles& tiles, void* memory) {
    const auto bytes_of = [](int64_t floats) { return (floats * 4 + 255) / 256 * 256; };
    const bool sums_rows = p.dbias.row_stride == 0;
    num_shares = static_cast<int>(sums_rows || tiles.chunks > 1 ? tiles.chunks : 0);
    const int64_t size = int64_t{tiles.batches} * tiles.heads * (sums_rows ? 1 : p.seqlen_q) * p.seqlen_k;
    const int64_t delta_bytes = bytes_of(p.heads_q * rows_of_head(p));
    delta = static_cast<float*>(memory);
    shares = num_shares ? reinterpret_cast<float*>(static_cast<char*>(memory) + delta_bytes) : nullptr;
    bytes = delta_bytes + bytes_of(num_shares * size);
  }
};

template <class Element, int kHeadDim>
void run_bias_gradient(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BiasConfig<Element, kHeadDim>;
  const BiasTiles tiles = bias_tiles<Element>(p);
  const BiasMemory workspace(p, tiles, memory);
  launch_bias_row_terms<Element>(p, workspace.delta, stream);
  BiasWorkTiles work_tiles{tiles, workspace.shares, 0, static_cast<int>(grid_size(tiles.count() * tiles.chunks))};
  if (work_tiles.count == 0) return;

  constexpr int64_t kFixedBytes = Config::kSlabsBytes + BiasStorage<Config>::bytes();
  const int64_t bias_bytes = Config::kWarps * Config::Bias::bytes(p.bias);
  work_tiles.buffers = kFixedBytes + 2 * bias_bytes <= shared_bytes_per_cta() ? 2 : 1;
  const BiasMaps maps = {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, Config::kRows),
                         encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kKeys),
                         encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kKeys),
                         encode_tensor_map(p.grad_out, query_shape(p, p.head_dim_v), p.dtype, Config::kRows)};
  const int64_t ctas = std::min<int64_t>(work_tiles.count, device_attribute(cudaDevAttrMultiProcessorCount));
  const LaunchShape shape{grid_of(ctas), dim3(Config::kThreads),
                          static_cast<size_t>(kFixedBytes + work_tiles.buffers * bias_bytes)};
  launch("sm90/bias_gradient", bias_gradient_kernel<Config>, shape, stream, p, maps, work_tiles, workspace.delta);
  if (workspace.shares) {
    const int64_t rows = p.dbias.row_stride == 0 ? 1 : p.seqlen_q;
    const int64_t ctas = (int64_t{tiles.batches} * tiles.heads * rows * p.seqlen_k + 255) / 256;
    launch("sm90/bias_gradient", bias_shares_kernel, {grid_of(ctas), dim3(256)}, stream, p, work_tiles,
           workspace.num_shares);
  }
}

}  // namespace flash_ext::sm90
