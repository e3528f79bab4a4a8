// Attention backward in float32 on wgmma (FlashAttention-2, Dao 2023, algorithm 2), recomputing the weights from lse:
//
//   S^T = K Q^T,   P^T = e^(S^T - lse),   dP^T = V dO^T,   dS^T = P^T (dP^T - D)    D: common/backward/row_terms.cuh
//   dV += P^T dO,  dK += dS^T Q,          dQ += dS K
//
// A float is the sum of three bfloat16, and a product the sum of six products (sm90/common/float_parts.cuh). The kernel
// of row terms splits Q and dO once, into subtiles that TMA loads as they are. A CTA splits its own 64 keys of K and V.
// Three warpgroups divide the products: consumer.cuh and producer.cuh. Beyond head_dim 128 the two CTAs of a cluster
// have half of the columns each, and exchange their halves of S^T and dP^T.
#pragma once

#include <algorithm>

#include "consumer.cuh"
#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/backward/row_terms.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/backward/dq_layout.cuh"
#include "kernels/sm90/common/float_rows.cuh"
#include "kernels/sm90/common/score_options.h"
#include "kernels/sm90/common/shared_memory.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// Loads the subtiles of a CTA of a cluster: 64 rows from first_row on, of its columns.
template <int kHeadDim, bool kBounded>
__device__ __forceinline__ void load_block_subtiles(char* subtiles, RowSource<const float, false> rows, int rank,
                                                    int first_row, int end_row, int columns, int thread) {
  constexpr int kColumns = kHeadDim / backward_f32_ctas_of_cluster(kHeadDim);
  rows.base += rank * kColumns;
  load_subtiles<panels(kColumns), kBounded>(subtiles, rows, first_row, end_row, columns - rank * kColumns, thread);
}

/// Waits for all threads of the CTAs that work together.
template <class Config>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
}

/// The code of a CTA. Warpgroup 0 computes dQ, 1 dV, 2 dK.
template <class Config>
__device__ __forceinline__ void run_backward_f32_cta(const BackwardParams& p, const BackwardF32Workspace& workspace,
                                                     const BackwardSchedule& schedule) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<BackwardF32Storage<Config>*>(shared + Config::kTilesBytes);
  ptx::launch_dependents();
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(blockIdx.x / Config::kCluster));
  if (!task.exists()) return ptx::wait_for_previous_grid();  // the next kernel relies on that
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  const int group = warp / kWarpgroupWarps, thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
  const int rank = Config::kCluster > 1 ? static_cast<int>(ptx::cluster_rank()) : 0;
  const uint32_t s_tiles = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    storage.init();
    storage.work_tile = BackwardWorkTile<Config>(p, workspace.rows, schedule, task);
  }
  // K meets weights of 0, which an Inf in it would turn into NaN. A query that does see it has it in its lse.
  if (group == 1)
    load_block_subtiles<Config::kHeadDim, true>(shared, key_rows<const float, false>(p, p.k, task.sequence), rank,
                                                task.first_key, task.sequence.seqlen_k, static_cast<int>(p.head_dim),
                                                thread);
  if (group == 2)
    load_block_subtiles<Config::kHeadDim, false>(
        shared + Config::kValuesOffset, key_rows<const float, false>(p, p.v, task.sequence), rank, task.first_key,
        task.sequence.seqlen_k, static_cast<int>(p.head_dim_v), thread);
  ptx::fence_proxy_async_shared();
  sync_cluster<Config>();
  if (group == 0) {
    ptx::release_registers<Config::kDqRegisters>();
    ptx::wait_for_previous_grid();  // for row terms, parts and zeroed sums; it loads what comes first
    BackwardF32Dq<Config>(p, workspace, storage, s_tiles, warp, lane).run();
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    if (group == 1) {
      BackwardF32Values<Config>(p, workspace, storage, s_tiles, warp, lane).run();
    } else {
      BackwardF32Gradients<Config>(p, workspace, storage, s_tiles, warp, lane).run();
    }
  }
  if constexpr (Config::kCluster > 1) ptx::cluster_sync();  // the other CTA may still arrive here
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_f32_kernel(const __grid_constant__ BackwardParams p,
                        const __grid_constant__ BackwardF32Workspace workspace,
                        const __grid_constant__ BackwardSchedule schedule) {
  run_backward_f32_cta<Config>(p, workspace, schedule);
}

/// The kernel of clusters, whose CTAs have half of the columns each.
template <class Config>
__global__ void __cluster_dims__(Config::kCluster, 1, 1) __launch_bounds__(Config::kThreads, 1)
    backward_f32_halves_kernel(const __grid_constant__ BackwardParams p,
                               const __grid_constant__ BackwardF32Workspace workspace,
                               const __grid_constant__ BackwardSchedule schedule) {
  run_backward_f32_cta<Config>(p, workspace, schedule);
}

/// Computes the row terms of a tile of a head; one warpgroup splits its Q, the other its dO. Inf and NaN become finite,
/// so that a weight of 0 hides them. The row's lse is NaN then, and carries them to all that the row sees.
template <int kHeadDim>
__device__ __forceinline__ void write_float_rows(const BackwardParams& p, const BackwardF32Workspace& workspace,
                                                 const volatile RowTileOfCta& cta, int head) {
  constexpr int kBlockM = kBackwardF32BlockM, kCtas = backward_f32_ctas_of_cluster(kHeadDim);
  constexpr int kBlockBytes = panels(kHeadDim / kCtas) * kSubtileBytes;
  static_assert(kRowTermThreads == 2 * kWarpgroupThreads);
  const Sequence sequence(p, cta.batch, head);
  const int first = cta.tile * kBlockM;
  if (cta.tile < 0 || first >= sequence.seqlen_q) return;
  const int64_t tile = workspace.rows.tile_index(p, cta.batch, head, sequence.q_begin, cta.tile, kBlockM);
  const bool is_grad = threadIdx.x >= kWarpgroupThreads;
  const TensorView& view = is_grad ? p.grad_out : p.q;
  const auto rows = query_rows<const float>(view, sequence);
#pragma unroll 1
  for (int rank = 0; rank < kCtas; ++rank)
    load_block_subtiles<kHeadDim, true>(
        (is_grad ? workspace.grads : workspace.queries) + (tile * kCtas + rank) * kBlockBytes, rows, rank, first,
        view.data ? sequence.seqlen_q : 0, static_cast<int>(is_grad ? p.head_dim_v : p.head_dim),
        static_cast<int>(threadIdx.x) % kWarpgroupThreads);
  write_row_terms<float, kHeadDim, kBlockM>(p, workspace.rows, cta, head);
}

template <int kHeadDim>
__global__ void __launch_bounds__(kRowTermThreads)
    backward_f32_rows_kernel(const __grid_constant__ BackwardParams p,
                             const __grid_constant__ BackwardF32Workspace workspace) {
  ptx::launch_dependents();
  const volatile RowTileOfCta& cta = RowTileOfCta::find(p, workspace.rows.row_tiles);
#pragma unroll 1
  for (int head = cta.first_head; head < cta.end_head; ++head) write_float_rows<kHeadDim>(p, workspace, cta, head);
}

template <class Config>
void launch_backward_f32(const BackwardParams& p, const BackwardF32Workspace& workspace,
                         const BackwardSchedule& schedule, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(BackwardF32Storage<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const LaunchShape keys{grid_of(Config::kCluster * schedule.positions()), dim3(Config::kThreads), kSharedBytes, true};
  if constexpr (Config::kCluster > 1) {
    launch("sm90/backward_f32", backward_f32_halves_kernel<Config>, keys, stream, p, workspace, schedule);
  } else {
    launch("sm90/backward_f32", backward_f32_kernel<Config>, keys, stream, p, workspace, schedule);
  }
}

template <int kHeadDim>
void run_backward_f32(const BackwardParams& p, void* memory, cudaStream_t stream) {
  constexpr int kBlockM = kBackwardF32BlockM;
  const BackwardF32Workspace workspace(p, memory);
  const BackwardSchedule schedule = backward_f32_schedule(p, workspace, memory);
  fill_work_list(p, schedule.listing, schedule.list, stream);
  constexpr BackwardKernelNames kNames = {"sm90/backward_f32 rows", "sm90/backward_f32", "sm90/backward_f32 dq",
                                          "sm90/backward_f32 sink"};
  const auto launch_row_terms = [&](const LaunchShape& rows) {
    launch(kNames.row_terms, backward_f32_rows_kernel<kHeadDim>, rows, stream, p, workspace);
  };
  using Rows = BackwardRowKernels<float, BackwardDqLayout<kHeadDim>, kBlockM, kHeadDim>;
  // Each kernel starts while the one before still runs, and waits for it by itself.
  launch_backward_sequence<Rows>(p, workspace.rows, kNames, true, stream, launch_row_terms, [&] {
    has_score_options(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale)
        ? launch_backward_f32<BackwardF32Config<kHeadDim, true>>(p, workspace, schedule, stream)
        : launch_backward_f32<BackwardF32Config<kHeadDim, false>>(p, workspace, schedule, stream);
    combine_splits<float, kBlockM, kBackwardF32BlockN, kHeadDim>(p, schedule, true, stream);
  });
}

}  // namespace flash_ext::sm90
