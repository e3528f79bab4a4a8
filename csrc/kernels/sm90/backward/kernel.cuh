// Attention backward on wgmma (FlashAttention-2, Dao 2023, algorithm 2), recomputing the probabilities from lse:
//
//   S^T = K Q^T,   P^T = 2^(S^T - lse),   dP^T = V dO^T,   dS^T = P^T (dP^T - D)    D: common/backward/row_terms.cuh
//   dV += P^T dO,  dK += dS^T Q,          dQ += dS K
#pragma once

#include <algorithm>
#include <type_traits>

#include "consumer.cuh"
#include "kernels/common/backward/dq_store.cuh"
#include "kernels/common/backward/row_terms.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/grid_dependency.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/tensor_map.h"
#include "mask_words.cuh"
#include "options_kernel.cuh"
#include "pipelined_bias_producer_dq.cuh"
#include "pipelined_consumer.cuh"
#include "pipelined_masks_producer_dq.cuh"
#include "pipelined_producer_dq.cuh"
#include "producer_dq.cuh"
#include "wide_kernel.cuh"

namespace flash_ext::sm90 {

/// What the warps of a CTA do, and share.
template <class Config_>
struct BackwardRoles {
  using Config = Config_;
  using Storage = BackwardStorage<Config>;
  using Maps = BackwardMaps;
  using Dq = BackwardDq<Config>;
  using Consumer = BackwardConsumer<Config>;
};
template <class Config_>
struct BackwardPipelinedRoles {
  using Config = Config_;
  using Storage = BackwardPipelinedStorage<Config>;
  using Maps = BackwardMaps;
  using Dq = BackwardPipelinedDq<Config>;
  using Consumer = BackwardPipelinedConsumer<Config>;
};

template <class Config_>
struct BackwardPipelinedOptionsRoles {
  using Config = Config_;
  using Storage = BackwardPipelinedOptionsStorage<Config>;
  using Maps = std::conditional_t<Config::kBiased, BackwardBiasMaps, BackwardMaps>;
  using Dq = std::conditional_t<
      Config::kBiased, BackwardBiasDq<Config>,
      std::conditional_t<Config::kTellsSteps, BackwardMasksDq<Config>, BackwardPipelinedDq<Config, Storage>>>;
  using Consumer = BackwardPipelinedConsumer<Config, BackwardOptionScores<Config>>;
};

/// Warpgroup 0 loads and makes dQ, the others compute.
template <class Roles, class Config = typename Roles::Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ typename Roles::Maps maps,
                    const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ BackwardSchedule schedule, float scale) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<typename Roles::Storage*>(shared + Config::kTilesBytes);
  ptx::launch_dependents();
  const BackwardTaskOf<Config> task(p, schedule, schedule.locate(position_of_cta<Config>(workspace, storage)));
  if (!task.exists()) return ptx::wait_for_previous_grid();  // the next kernel relies on that
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    storage.init();
    storage.work_tile() = BackwardWorkTile<Config>(p, workspace, schedule, task);
    storage.prepare(p);
  }
  __syncthreads();
  storage.look_at_masks(p, workspace);
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kShape.dq_registers>();
    ptx::wait_for_previous_grid();  // for row terms and zeroed sums
    typename Roles::Dq(p, maps, workspace, storage, ptx::shared_address(shared), warp, lane).run();
  } else {
    ptx::acquire_registers<Config::kShape.registers>();
    find_large_lse(workspace, storage.work_tile(), warp / kWarpgroupWarps - 1, lane);
    typename Roles::Consumer(p, storage, ptx::shared_address(shared), scale, warp / kWarpgroupWarps - 1, lane).run();
  }
}

template <class Element, int kHeadDim, bool kInTurns = false>
using BackwardConfigOf =
    std::conditional_t<(kHeadDim > kMaxNarrowHeadDim), BackwardWideConfig<Element, kHeadDim, kInTurns>,
                       BackwardConfig<Element, kHeadDim, kInTurns>>;

template <class Config>
BackwardWorkspace backward_workspace(const BackwardParams& p, void* memory) {
  return BackwardWorkspace(p, Config::kBlockM, Config::kBlockN, Config::kDqHeadDim, memory);
}
/// Behind the workspace in the same memory.
template <class Config>
BackwardSchedule backward_schedule(const BackwardParams& p, const BackwardWorkspace& workspace, void* memory) {
  return BackwardSchedule(p, Config::kBlockN, Config::kHeadDim, false, static_cast<char*>(memory) + workspace.bytes);
}

/// Whether dK and dV are too much for one warpgroup: wide_kernel.cuh.
template <class Config>
constexpr bool kIsWide = Config::kHeadDim > kMaxNarrowHeadDim;

/// The main kernel of calls without options. kPipelined: products of a step overlap those of the next.
template <class Config, bool kPipelined>
void launch_plain_backward(const BackwardParams& p, const BackwardMaps& maps, const BackwardWorkspace& workspace,
                           const BackwardSchedule& schedule, bool overlaps_previous, cudaStream_t stream) {
  const auto run = [&](auto kernel, size_t shared_bytes) {
    const LaunchShape keys{grid_of(Config::kCluster * schedule.positions()), dim3(Config::kThreads), shared_bytes,
                           overlaps_previous};
    launch("sm90/backward", kernel, keys, stream, p, maps, workspace, schedule,
           static_cast<float>(p.softmax_scale) * kLog2E);
  };
  constexpr size_t kMaxSharedBytes = 227 * 1024;  // of a CTA
  const auto run_config = [&](auto config) {
    using Chosen = decltype(config);
    if constexpr (kIsWide<Chosen>) {
      constexpr size_t kSharedBytes = Chosen::kTilesBytes + sizeof(BackwardWideStorage<Chosen>);
      static_assert(kSharedBytes <= kMaxSharedBytes);
      run(backward_wide_kernel<Chosen>, kSharedBytes);
    } else {
      using Pipelined = BackwardPipelinedConfig<typename Chosen::Element, Chosen::kHeadDim>;
      using Roles = std::conditional_t<kPipelined, BackwardPipelinedRoles<Pipelined>, BackwardRoles<Chosen>>;
      constexpr size_t kSharedBytes = Roles::Config::kTilesBytes + sizeof(typename Roles::Storage);
      static_assert(kSharedBytes <= kMaxSharedBytes && Roles::Config::kBlockN == Config::kBlockN);
      run(backward_kernel<Roles>, kSharedBytes);
    }
  };
  if constexpr (!kPipelined) {
    if (workspace.turns) return run_config(BackwardConfigOf<typename Config::Element, Config::kHeadDim, true>());
  }
  run_config(Config());
}

inline BackwardMaps maps_of(const BackwardParams&, const BackwardMaps& maps, std::false_type) { return maps; }
inline BackwardBiasMaps maps_of(const BackwardParams& p, const BackwardMaps& maps, std::true_type) {
  return {maps, encode_bias_map(p, kBackwardBlockM)};
}

/// The main kernel of calls with these options.
template <class Config>
void launch_pipelined_variant(const BackwardParams& p, const BackwardMaps& maps, const BackwardWorkspace& workspace,
                              const BackwardSchedule& schedule, cudaStream_t stream) {
  using Roles = BackwardPipelinedOptionsRoles<Config>;
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(typename Roles::Storage);
  static_assert(kSharedBytes <= 227 * 1024);
  // Of products, to base 2 or, where a softcap bounds them, to the argument of its tanh.
  const double scale = p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale * double{kLog2E};
  const LaunchShape keys{grid_of(schedule.positions()), dim3(Config::kThreads), kSharedBytes, true};
  launch("sm90/backward", backward_kernel<Roles>, keys, stream, p,
         maps_of(p, maps, std::bool_constant<Config::kBiased>()), workspace, schedule, static_cast<float>(scale));
}

/// Those that the pipelined loop serves, and what their masks need.
template <class Config>
void launch_pipelined_options(const BackwardParams& p, const BackwardMaps& maps, const BackwardWorkspace& workspace,
                              const BackwardSchedule& schedule, cudaStream_t stream) {
  if (workspace.turns) throw std::logic_error("flash_ext: sm90/backward: no turns beside options");
  if (masks_pairs(p)) {
    const VisibilityTiles& visibility = workspace.visibility;
    const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
    launch("sm90/backward masks", mask_words_kernel<Config::kBlockM, Config::kBlockN>, tiles, stream, p, visibility);
  }
  with_pipelined_options(serving_options(asked_of(p)), [&](auto options) {
    using Variant = BackwardPipelinedOptionsConfig<typename Config::Element, Config::kHeadDim, options()>;
    static_assert(Variant::kBlockN == Config::kBlockN && Variant::kBlockM == Config::kBlockM);
    launch_pipelined_variant<Variant>(p, maps, workspace, schedule, stream);
  });
}

/// kPipelined: of calls that pipelines() is true for alone.
template <class Config, bool kPipelined>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kHeadDim = Config::kDqHeadDim;
  // Kernels start while the one before still runs, and wait for it by themselves; wide ones lose by it.
  constexpr bool kOverlaps = !kIsWide<Config>;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, memory);
  const BackwardSchedule schedule = backward_schedule<Config>(p, workspace, memory);
  fill_work_list(p, schedule.listing, schedule.list, stream);
  const LaunchShape rows{grid_of(RowTileOfBlock::blocks(p, kBlockM)), dim3(kRowTermThreads)};
  launch("sm90/backward rows", backward_row_terms_kernel<Element, kHeadDim, kBlockM, kPipelined>, rows, stream, p,
         workspace);

  if (p.dq.data || p.dk.data || p.dv.data) {
    const BackwardMaps maps = {encode_tensor_map(p.q, query_shape(p, p.head_dim), p.dtype, kBlockM),
                               encode_tensor_map(p.k, key_shape(p, p.head_dim), p.dtype, Config::kLoadedKeys),
                               encode_tensor_map(p.v, key_shape(p, p.head_dim_v), p.dtype, Config::kLoadedKeys),
                               encode_tensor_map(p.grad_out, query_shape(p, p.head_dim_v), p.dtype, kBlockM)};
    if constexpr (kPipelined) {
      has_options(p) ? launch_pipelined_options<Config>(p, maps, workspace, schedule, stream)
                     : launch_plain_backward<Config, true>(p, maps, workspace, schedule, kOverlaps, stream);
    } else if constexpr (kIsWide<Config>) {
      launch_plain_backward<Config, false>(p, maps, workspace, schedule, kOverlaps, stream);
    } else if (has_options(p)) {
      launch_backward_options<Config>(p, maps, workspace, schedule, stream);
    } else if constexpr (!is_pipelined(kHeadDim)) {
      launch_plain_backward<Config, false>(p, maps, workspace, schedule, kOverlaps, stream);
    }
    combine_splits<Element, kBlockM, Config::kBlockN, Config::kHeadDim>(p, schedule, kOverlaps, stream);
  }
  if (p.dq.data) {
    LaunchShape overlapping = rows;
    overlapping.overlaps_previous = kOverlaps;
    launch("sm90/backward dq", store_dq_kernel<Element, BackwardDqLayout<kHeadDim>, kBlockM, kHeadDim>, overlapping,
           stream, p, workspace);
  }
  if (p.dsink) {
    const LaunchShape heads{grid_of(p.heads_q), dim3(kRowTermThreads)};
    launch("sm90/backward sink", sink_gradient_kernel<kBlockM, kPipelined>, heads, stream, p, workspace);
  }
}

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  using Config = BackwardConfigOf<Element, kHeadDim>;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, nullptr);
  return workspace.bytes + backward_schedule<Config>(p, workspace, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardConfigOf<Element, kHeadDim>;
  if constexpr (is_pipelined(kHeadDim)) {
    if (pipelines(serving_options(asked_of(p)), p.blocks.offsets))
      return launch_backward<Config, true>(p, memory, stream);
  }
  launch_backward<Config, false>(p, memory, stream);
}

}  // namespace flash_ext::sm90
