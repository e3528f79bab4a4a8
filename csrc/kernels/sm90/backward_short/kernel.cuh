// Attention backward of short sequences on wgmma (FlashAttention-2, Dao 2023, algorithm 2): one kernel, a CTA for each
// head, whose Q, K, V and dO lie in shared memory whole.
//
//   warpgroup g:  row terms of queries [64 g, + 64)  |  dK, dV of keys [64 g, + 64)  |  dQ of queries [64 g, + 64)
//
// No sums are added up in memory. Up to head_dim 64 no warpgroup waits for another once the tiles are there; above,
// they exchange dS before the last part.
#pragma once

#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/tensor_map.h"
#include "kernels/launch.h"
#include "kernels/sm90/common/backward/sanitise.cuh"
#include "key_consumer.cuh"
#include "query_consumer.cuh"
#include "query_sums.cuh"
#include "row_terms.cuh"

namespace flash_ext::sm90 {

// There are no kernels for row terms and dQ: both stay in the CTA.
constexpr BackwardKernelNames kBackwardShortNames = {nullptr, "sm90/backward_short", nullptr,
                                                     "sm90/backward_short sink"};

/// Whether some pair may be hidden, or rows lie past the lengths in use.
__device__ __forceinline__ bool hides_rows(const BackwardParams& p) {
  return p.window.left >= 0 || p.window.right >= 0 || p.seq.seqused_q || p.seq.seqused_k || p.seq.leftpad_k;
}

/// Sanitises tiles where pairs are hidden, and K in any case: a query that sees an Inf or NaN in K has it in lse, or
/// has a score of -inf.
template <class Config>
__device__ __forceinline__ void sanitise_short_tiles(const BackwardParams& p, uint32_t s_tiles) {
  using Element = typename Config::Element;
  const int thread = static_cast<int>(threadIdx.x);
  sanitise_tile<Element, Config::kTileBytes, Config::kThreads>(s_tiles + Config::kKeysOffset, thread);
  if (!hides_rows(p)) return;
  sanitise_tile<Element, 2 * Config::kTileBytes, Config::kThreads>(s_tiles + Config::kQueriesOffset, thread);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    backward_short_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardShortMaps maps,
                          const __grid_constant__ BackwardWorkspace workspace, float scale) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardShortStorage<Config>*>(shared + Config::kTilesBytes);
  const uint32_t s_tiles = ptx::shared_address(shared);
  const int batch = static_cast<int>(blockIdx.x) / static_cast<int>(p.heads_q);
  const Sequence sequence(p, batch, static_cast<int>(blockIdx.x) % static_cast<int>(p.heads_q));
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / kWarpgroupWarps, warp_of_group = warp % kWarpgroupWarps;

  if (threadIdx.x == 0) {
    storage.sequence() = sequence;
    storage.load(maps, sequence, s_tiles);
  }
  float* const g_minus_delta =
      p.dsink
          ? workspace.minus_delta + workspace.tile_index(p, batch, sequence.head, 0, 0, kWarpgroupRows) * kWarpgroupRows
          : nullptr;
  const bool found = write_short_terms<Config>(p, sequence, storage, g_minus_delta, group * kWarpgroupRows,
                                               static_cast<int>(threadIdx.x) % kWarpgroupThreads);
  const bool large = __syncthreads_or(found);  // barriers are initialised, terms written
  wait_for(storage.scores_full, 0);
  wait_for(storage.grads_full, 0);
  sanitise_short_tiles<Config>(p, s_tiles);
  __syncthreads();

  if (p.dk.data || p.dv.data || (Config::kExchangesDs && p.dq.data))
    BackwardShortKeys<Config>(p, storage, s_tiles, scale, group, warp_of_group, lane, large).run();
  if constexpr (Config::kExchangesDs) {
    ptx::fence_proxy_async_shared();
    __syncthreads();  // dS of all keys
    BackwardShortQuerySums<Config>(p, storage, s_tiles, scale, group, warp_of_group, lane, large).run();
  } else {
    BackwardShortQueries<Config>(p, storage, s_tiles, scale, group, warp_of_group, lane, large).run();
  }
}

inline BackwardWorkspace backward_short_workspace(const BackwardParams& p, void* memory) {
  BackwardParams without_sums = p;  // dQ is not summed up in memory
  without_sums.dq.data = nullptr;
  return BackwardWorkspace(without_sums, kWarpgroupRows, kWarpgroupRows, kBackwardShortHeadDim, memory);
}

template <class Config>
void launch_backward_short(const BackwardParams& p, void* memory, cudaStream_t stream) {
  const BackwardWorkspace workspace = backward_short_workspace(p, memory);
  const auto map_of = [&](const TensorView& view, const TensorShape& shape) {
    return encode_tensor_map(view, shape, p.dtype, Config::kRowsOfCopy);
  };
  const BackwardShortMaps maps = {map_of(p.q, query_shape(p, p.head_dim)), map_of(p.k, key_shape(p, p.head_dim)),
                                  map_of(p.v, key_shape(p, p.head_dim_v)),
                                  map_of(p.grad_out, query_shape(p, p.head_dim_v))};
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardShortStorage<Config>);
  const LaunchShape heads{grid_of(p.batch * p.heads_q), dim3(Config::kThreads), kSharedBytes};
  launch(kBackwardShortNames.main, backward_short_kernel<Config>, heads, stream, p, maps, workspace,
         score_scale(p, kLog2E));
  using Rows = BackwardRowKernels<typename Config::Element, void, kWarpgroupRows, Config::kHeadDim>;
  launch_sink_gradient<Rows>(p, workspace, kBackwardShortNames, stream);
}

template <class Element, int kHeadDim, int kWarpgroups>
void run_backward_short(const BackwardParams& p, void* memory, cudaStream_t stream) {
  launch_backward_short<BackwardShortConfig<Element, kHeadDim, kWarpgroups>>(p, memory, stream);
}

}  // namespace flash_ext::sm90
