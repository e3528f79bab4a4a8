// Attention forward on mma.sync:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A CTA owns kBlockM queries of one head. Each of its warps owns kWarpRows of these queries and visits all keys that
// they see, so that warps share nothing but the loads. K and V tiles come through cp.async, one tile ahead.
//
// The stabiliser r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It
// is the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. The row sums detect overflow: where the sum of a tile passes kSumLimit, its exponent is
// added to the row stabiliser, while P is still in float.
//
// Two rare cases are found at the end of the loop, and the CTA then recomputes its rows. It takes the safe path, with
// the running maximum, where a sum overflowed in float or vanished beside its stabiliser. It sanitises V where an Inf
// or NaN in V met the weight of a hidden pair, because 0 * Inf is NaN.
//
// A step, for tile n of the keys, from the last to the first, with one stage of shared memory for K and one for V:
//   wait for K(n), barrier: all warps have read V(n + 1); issue V(n)
//   S = Q K(n)^T
//   wait for V(n), barrier: all warps have read K(n); issue K(n - 1)
//   P = 2^(S - r), O += P V(n)
// and with two stages, where one barrier is enough:
//   wait for K(n) and V(n), barrier: all warps have read K(n + 1), V(n + 1); issue K(n - 1), V(n - 1)
//   S = Q K(n)^T, P = 2^(S - r), O += P V(n)
#pragma once

#include <new>

#include "consumer.cuh"
#include "kernels/launch.h"
#include "scheduler.cuh"

namespace flash_ext::sm80 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardConstants constants) {
  extern __shared__ __align__(128) char shared[];
  const TileIndex tile = tile_of_cta<Config>(p, constants);
  if (tile.tile == kNoTile) return;
  const int batch = tile.sequence, head = tile.head, first_query = tile.tile * Config::kBlockM;
  ForwardWorkTile<Config> work_tile(p, batch, head, first_query);
  work_tile.masks.find(constants.masks, batch, head, first_query);
  if (first_query >= work_tile.sequence.seqlen_q) return;
  auto* const s_work_tile = reinterpret_cast<ForwardWorkTile<Config>*>(shared + Config::kTilesBytes);
  if (threadIdx.x == 0) new (s_work_tile) ForwardWorkTile<Config>(work_tile);
  ForwardConsumer<Config> consumer(p, constants, *s_work_tile, shared);
  // With a mask, the first tile is not known yet: the mask may leave nothing of the last tiles.
  if constexpr (!Config::kMasks) consumer.begin(work_tile, work_tile.tiles.end - 1);
  __syncthreads();
  consumer.run();
}

template <class Config>
void launch_forward(const ForwardParams& p, const ForwardMasks& masks, void* list, cudaStream_t stream) {
  ForwardConstants constants = schedule_heads(p, sizeof(typename Config::Element));
  const int64_t shared_bytes = plan_options<Config>(constants, p);
  if constexpr (Config::kMasks) constants.masks = masks;
  const WorkListPlan plan = forward_work_list(p, Config::kBlockM);
  constants.list = plan.view(list);
  fill_work_list(p, plan, constants.list, stream);
  const dim3 grid =
      plan.listed ? grid_of(plan.max_work_tiles())
                  : grid_of(int64_t{constants.heads} * constants.batches, tiles_of_rows(p.seqlen_q, Config::kBlockM),
                            int64_t{constants.batch_groups} * constants.groups);
  launch("sm80/forward", forward_kernel<Config>, {grid, dim3(Config::kThreads), static_cast<size_t>(shared_bytes)},
         stream, p, constants);
}

template <class Element, int kHeadDim, bool kSmall>
void run_forward_as(const ForwardParams& p, const ForwardMasks& masks, void* list, cudaStream_t stream) {
  const auto run = [&](auto wanted) {
    constexpr ForwardVariant kVariant = available_variant(decltype(wanted)::value, sizeof(Element) == 4, kHeadDim);
    launch_forward<ForwardConfig<Element, kHeadDim, kVariant, kSmall>>(p, masks, list, stream);
  };
  switch (variant_of(p)) {
    case ForwardVariant::kPlain:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kPlain>());
    case ForwardVariant::kComputes:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kComputes>());
    case ForwardVariant::kReads:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kReads>());
    case ForwardVariant::kBias:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kBias>());
    case ForwardVariant::kFloatBias:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kFloatBias>());
    case ForwardVariant::kMask:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kMask>());
    case ForwardVariant::kDrops:
      return run(std::integral_constant<ForwardVariant, ForwardVariant::kDrops>());
  }
}

/// `list`: memory for the work list.
template <class Element, int kHeadDim>
void run_forward(const ForwardParams& p, const ForwardMasks& masks, void* list, cudaStream_t stream) {
  constexpr bool kFloat = sizeof(Element) == 4;
  if constexpr (has_small_forward(kHeadDim, kFloat)) {
    if (takes_small_forward(kHeadDim, kFloat, shared_bytes_per_cta(), shared_bytes_per_sm()))
      return run_forward_as<Element, kHeadDim, true>(p, masks, list, stream);
  }
  run_forward_as<Element, kHeadDim, false>(p, masks, list, stream);
}

}  // namespace flash_ext::sm80
