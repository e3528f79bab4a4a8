// Attention backward on mma.sync (FlashAttention-2, Dao 2023, algorithm 2), recomputing the probabilities from lse:
//
//   S^T = K Q^T,   P^T = e^(S^T - lse),   dP^T = V dO^T,   dS^T = P^T (dP^T - D)     D: common/backward/row_terms.cuh
//   dV += P^T dO,  dK += dS^T Q,          dQ += dS K
//
// A CTA owns kBlockN keys of one key head and loops over all query tiles that see them, of all heads of the group. Half
// of its warps, the P warps, compute S^T, P^T and dV; the others, the dS warps, compute dP^T, dS^T and dK. A warp owns
// kWarpKeys keys of S^T or dP^T, so its result is the A operand of its second product without leaving its registers.
// P^T goes to the dS warps through a tile in shared memory. They store dS^T in its place (a warp reads and writes the
// same elements), and from there all warps compute dQ, each a part of the query tile.
//
// Half-steps, with a barrier before each; m counts query tiles:
//             P warps                                        dS warps
//   2 m       S^T(m) = K Q(m)^T, P^T(m), stored              dK += dS^T(m - 1) Q(m - 1), dQ(m - 1)
//   2 m + 1   dV += P^T(m) dO(m), dQ(m - 1)                  dP^T(m) = V dO(m)^T, dS^T(m), stored
// So the exponentials, or dS, of one half of the warps always run beside products of the other. Both halves run the
// same code, half a step apart. Q(m + 1) is loaded during 2 m + 1, dO(m) during 2 m: two stages of Q, one of dO.
//
// Options: only the P warps know the derivative of the softcap, so they multiply the P^T that the dS warps get by it.
// The dS warps compute the Philox random bits, also those that the P warps need: those of step m + 1 during 2 m.
//
// dQ is summed over the CTAs by atomic additions to float tiles (common/backward/dq_store.cuh). Deterministic:
// additions to a tile take turns, from its last keys to its first, which is the order in which CTAs take their keys.
#pragma once

#include "consumer.cuh"
#include "kernels/common/backward/large_lse.cuh"
#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/common/score/bias_tile.cuh"
#include "kernels/common/score/scale.h"
#include "kernels/launch.h"
#include "kernels/sm80/common/config.h"
#include "names.h"
#include "slabs.cuh"

namespace flash_ext::sm80 {

/// CTAs of a head run side by side, so that its queries stay in L2, under a causal mask those of a section of heads;
/// the first keys, which the most queries see, then come first. With a work list, its order holds. Deterministic: CTAs
/// take numbers when they start, and the last keys of a head have the first number, so that a CTA waits only for CTAs
/// that run.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace workspace,
                    const __grid_constant__ BackwardSchedule schedule, bool copies_bias) {
  extern __shared__ __align__(128) char shared[];
  auto* const s_work_tile =
      reinterpret_cast<BackwardWorkTile<Config>*>(shared + Config::kSharedBytes - Config::kWorkTileBytes);
  auto* const s_ticket = reinterpret_cast<unsigned*>(s_work_tile);
  unsigned number = blockIdx.x;
  if (workspace.turns) {
    if (threadIdx.x == 0) *s_ticket = static_cast<unsigned>(atomicAdd(workspace.ticket, 1));
    __syncthreads();
    number = *s_ticket;
    __syncthreads();
  }
  const BackwardTask<Config::kBlockM, Config::kBlockN> task(p, schedule, schedule.locate(number));
  if (!task.exists()) return;
  BackwardConsumer<Config> consumer(p, workspace, copies_bias, *s_work_tile, shared);
  consumer.load_keys(task.sequence, task.first_key);
  const BackwardWorkTile<Config> work_tile(p, workspace, schedule, task);
  consumer.load_first_queries(work_tile);
  if (threadIdx.x == 0) *s_work_tile = work_tile;
  if constexpr (BackwardConsumer<Config>::kBoundsWeights) {
    const TileSpan& tiles = work_tile.tiles;
    const bool large = finds_large_lse(workspace, work_tile.workspace_tile + tiles.begin, tiles.end - tiles.begin,
                                       work_tile.heads, static_cast<int>(threadIdx.x), Config::kThreads);
    if (__syncthreads_or(large) && threadIdx.x == 0) s_work_tile->take_large_lse();
  }
  __syncthreads();
  consumer.run();
}

template <class Config>
BackwardWorkspace backward_workspace(const BackwardParams& p, void* memory) {
  return BackwardWorkspace(p, Config::kBlockM, Config::kBlockN, Config::kHeadDim, memory);
}
/// Places the schedule after the workspace in the same memory.
template <class Config>
BackwardSchedule backward_schedule(const BackwardParams& p, const BackwardWorkspace& workspace, void* memory) {
  return BackwardSchedule(p, Config::kBlockN, Config::kHeadDim, workspace.turns != nullptr,
                          static_cast<char*>(memory) + workspace.bytes);
}

/// Bytes of a CTA's shared memory.
template <class Config>
int64_t backward_shared_bytes(const BackwardParams& p) {
  const int64_t bias = p.bias.data ? bias_tile_bytes(p.bias.dtype, Config::kBlockM, Config::kBlockN) : 0;
  return Config::kSharedBytes + (Config::kHasOptions ? bias : 0);
}

template <class Config>
void launch_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Element = typename Config::Element;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  const BackwardWorkspace workspace = backward_workspace<Config>(p, memory);
  const BackwardSchedule schedule = backward_schedule<Config>(p, workspace, memory);
  fill_work_list(p, schedule.listing, schedule.list, stream);
  using Rows = BackwardRowKernels<Element, typename Config::Dq, kBlockM, kHeadDim>;
  launch_backward_sequence<Rows>(p, workspace, kBackwardNames, false, stream, [&] {
    const VisibilityTiles& visibility = workspace.visibility;
    const LaunchShape tiles{grid_of(visibility.num_states()), dim3(kVisibilityThreads)};
    launch("sm80/backward masks", mask_tiles_kernel<kBlockM, kBlockN>, tiles, stream, p, visibility);
    const LaunchShape keys{grid_of(schedule.positions()), dim3(Config::kThreads),
                           static_cast<size_t>(backward_shared_bytes<Config>(p))};
    launch(kBackwardNames.main, backward_kernel<Config>, keys, stream, p, workspace, schedule, can_stage_bias(p.bias));
    combine_splits<Element, kBlockM, kBlockN, kHeadDim>(p, schedule, false, stream);
  });
}

inline bool is_plain_backward(const BackwardParams& p) {
  const bool plain_scores = is_positive_scale(p.softmax_scale) && p.softcap == 0 && !p.alibi_slopes;
  return plain_scores && !hides_pairs(p) && p.dropout.rule.threshold == 0;
}

template <class Config>
struct TiledBackward {
  static int64_t bytes(const BackwardParams& p) {
    const BackwardWorkspace workspace = backward_workspace<Config>(p, nullptr);
    return workspace.bytes + backward_schedule<Config>(p, workspace, nullptr).bytes;
  }
  static void run(const BackwardParams& p, void* memory, cudaStream_t stream) {
    launch_backward<Config>(p, memory, stream);
  }
};

/// Calls run with the implementation that serves a call on the current device.
template <class Element, int kHeadDim, class Run>
void with_backward(const BackwardParams& p, Run run) {
  constexpr bool kFloat = sizeof(Element) == 4;
  using Plain = BackwardConfig<Element, kHeadDim, false, false>;
  using WithOptions = BackwardConfig<Element, kHeadDim, true, false>;
  const int64_t bias_bytes = backward_shared_bytes<WithOptions>(p) - WithOptions::kSharedBytes;
  switch (choose_backward_tiling(kHeadDim, kFloat, is_plain_backward(p), bias_bytes, shared_bytes_per_cta())) {
    case BackwardTiling::kPlain:
      return run(TiledBackward<Plain>());
    case BackwardTiling::kAllOptions:
      return run(TiledBackward<WithOptions>());
    case BackwardTiling::kSmall:
      if constexpr (!kFloat || kHeadDim != 256) run(TiledBackward<BackwardConfig<Element, kHeadDim, true, true>>());
      return;
    case BackwardTiling::kSlabs:
      if constexpr (kFloat && kHeadDim == 256) run(SlabBackward<Element, kHeadDim>());
      return;
  }
}

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  int64_t bytes = 0;
  with_backward<Element, kHeadDim>(p, [&](auto backward) { bytes = decltype(backward)::bytes(p); });
  return bytes;
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  with_backward<Element, kHeadDim>(p, [&](auto backward) { decltype(backward)::run(p, memory, stream); });
}

}  // namespace flash_ext::sm80
