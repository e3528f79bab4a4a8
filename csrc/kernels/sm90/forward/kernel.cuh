// Attention forward on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A CTA computes query tiles of kBlockM queries of one head. It visits the key tiles that a query tile sees from the
// last one to the first. Two to four consumer warpgroups compute 64 queries each (consumer.cuh) and wait only for the
// loads. The four warps of one more warpgroup are producers:
//   warp 0  loads K through TMA, and V unless warp 2 does (producer.cuh)
//   warp 1  loads Q and stores out; in the variants with bias, masks or dropout it also loads the bias
//   warp 2  sanitises V; it also loads V in those variants, for block masks, at head_dim 256, and where a tile of a
//           cache takes several copies
//   warp 3  writes the metadata of work tiles, and requeues those that need recomputing (scheduler.cuh)
// A consumer's step for key tile n, with P of tile n + 1 in registers:
//   wait for K(n); start S = Q K(n)^T; wait for V(n + 1); start O += P V(n + 1)
//   S is complete: release K(n); 2^(S - r); O is complete: release V(n + 1); P = 2^(S - r)
// The exponentials hide behind the products of this warpgroup and of the others. So does the end of a query tile,
// because Q of the next one has arrived by then.
//
// The row stabiliser r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows.
// It is the maximum of the first tile in which the row sees a key, and then stays fixed, so the loop has neither a
// maximum nor a rescaling of the output. An overflow leaves an Inf, a NaN or a huge sum that no later tile removes.
// Sum and out are therefore checked once, at the end of the query tile (epilogue.cuh). If the check fails, the CTA
// recomputes the query tile with V sanitised, because a weight of 0 does not hide Inf and NaN. After an overflow, or if
// the check fails again, it does so on the safe path, with the running maximum.
//
// Variants (shape.h) differ in how they traverse the key tiles and in what they do to scores:
//   traverse_range.cuh          plain, caches, max_logit: a range of tiles
//   traverse_from_diagonal.cuh  softcap, ALiBi, any scale: the range, from the diagonal on
//   traverse_listed.cuh         a block mask alone: the tiles that it lists
//   traverse_visible.cuh        bias, masks, dropout: the tiles of the range that masks leave
//
// Barriers (storage.cuh): who arrives -> who waits:
//   work_tile_full/empty   warp 3 -> all others -> warp 3
//   work_tile_loaded       warp 0 -> warp 3: few tiles of K are left to load, so the next work tile may be taken
//   q_full, q_empty        warp 1 -> consumers -> warp 1
//   k_full, k_empty        warp 0 -> consumers -> warp 0
//   v_full, v_empty        warp 0 or 2 -> consumers, sanitiser -> warp 0 or 2
//   v_raw                  warp 0 or 2 -> sanitiser, which arrives at v_full
//   out_full, out_left_*   consumers -> warp 1 -> warps 0 and 2
//   bias_full, bias_empty  warp 1 -> consumers -> warp 1
#pragma once

#include <algorithm>

#include "arguments.cuh"
#include "consumer.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/barrier.h"
#include "kernels/ptx/lane.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/shared_memory.h"
#include "producer.cuh"
#include "scheduler.cuh"
#include "visible_producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
using ForwardProducerOf = std::conditional_t<Config::kVisible, ForwardVisibleProducer<Config>, ForwardProducer<Config>>;

/// The lane of a thread, read once for all roles or once in each role. The variants with bias, masks or dropout read it
/// in each role: otherwise the role with the fewest registers keeps it alive throughout.
template <class Config>
class Lane {
 public:
  __device__ __forceinline__ int operator()() const {
    if constexpr (Config::kVisible) {
      return ptx::lane_id();
    } else {
      return lane_;
    }
  }

 private:
  static __device__ __forceinline__ int read() {
    if constexpr (Config::kVisible) {
      return 0;
    } else {
      return Config::kScoreOptions ? ptx::lane_id() : static_cast<int>(threadIdx.x) % 32;
    }
  }
  const int lane_ = read();
};

/// Returns when warp 0 has initialised shared memory. Each other producer warp and each consumer warpgroup has a
/// barrier at which warp 0 only arrives: it waits for nobody, and all who wait at a barrier do so at one place of the
/// program, as compute-sanitizer's synccheck wants it.
template <class Config>
__device__ __forceinline__ void start_warp(int warp) {
  constexpr int kOfWarp = 2 * 32, kOfGroup = 32 + kWarpgroupThreads;  // threads
  static_assert(Config::kWarpgroups <= 4, "storage.cuh has barriers for four: a CTA has 16 barriers");
  if (warp == 0) {
#pragma unroll
    for (int other = 1; other < kWarpgroupWarps; ++other) ptx::barrier_arrive<kOfWarp>(warp_started(other));
#pragma unroll
    for (int group = 0; group < Config::kWarpgroups; ++group) ptx::barrier_arrive<kOfGroup>(warpgroup_started(group));
  } else if (warp < kWarpgroupWarps) {
    ptx::barrier_sync<kOfWarp>(warp_started(warp));
  } else {
    ptx::barrier_sync<kOfGroup>(warpgroup_started(warp / kWarpgroupWarps - 1));
  }
}

/// The main kernel of every variant. Warpgroup 0 has the producers, the others are consumers.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_kernel(const __grid_constant__ typename ForwardParameters<Config>::Call call,
                   const __grid_constant__ typename ForwardParameters<Config>::Maps maps,
                   const ForwardScheduleOf<Config> schedule,
                   const __grid_constant__ typename ForwardParameters<Config>::ScoreArgument terms) {
  extern __shared__ __align__(1024) char shared[];
  const ForwardArguments<Config> arguments = {call, maps, terms};
  auto& storage = *reinterpret_cast<ForwardStorageOf<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const Lane<Config> lane;
  ForwardScheduler<Config> scheduler(call.p, storage);
  if (threadIdx.x == 0) storage.init();
  if (!Config::kVisible && warp == 1 && lane() == 0) {
    maps.prefetch();
    if constexpr (Config::kSplitsKv) ptx::launch_dependents();  // combine_splits_kernel(), which waits for this grid
  }
  // Each role calls start() where its own instructions begin, so that they are fetched while warp 3 makes the first
  // work tile. In a model L2 seldom holds the instructions, and each fetch takes about 1000 cycles. Therefore loops
  // that warp 1 runs once per work tile are not unrolled, and the producers' code comes first (nvcc 13 places the
  // second branch first): instructions near the entry arrive soonest.
  const auto start = [&] {
    start_warp<Config>(warp);
    if constexpr (Config::kSplitsKv)
      if (!schedule.taken) ptx::wait_for_previous_grid();  // up to here this grid may overlap the previous one
  };
  __syncwarp();  // for setmaxnreg
  if (warp >= kWarpgroupWarps) {
    ptx::acquire_registers<Config::kRegisters>();
    const float scale = arguments.scale();
    ForwardConsumer<Config>(arguments, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1, lane(), scale)
        .run(start);
  } else {
    ptx::release_registers<Config::kProducerRegisters>();
    ForwardProducer<Config>::run(ForwardProducerOf<Config>(arguments, storage, shared, lane()), warp, scheduler,
                                 schedule, start);
  }
}

/// Launches a persistent grid: each CTA computes several work tiles.
template <class Config>
void launch_forward(const typename ForwardParameters<Config>::Call& call,
                    const typename ForwardParameters<Config>::Maps& maps, const ForwardScheduleOf<Config>& schedule,
                    const typename ForwardParameters<Config>::ScoreArgument& terms, bool overlaps_previous,
                    cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardStorageOf<Config>);
  static_assert(Config::kCtasPerSm * (kSharedBytes + kReservedSharedBytes) <= kSharedBytesOfSm);
  const int64_t ctas = std::min<int64_t>(schedule.size(), ctas_at_a_time(Config::kShape));
  const LaunchShape shape = {dim3(grid_size(ctas)), dim3(Config::kThreads), kSharedBytes, overlaps_previous};
  launch("sm90/forward", forward_kernel<Config>, shape, stream, call, maps, schedule, terms);
}

}  // namespace flash_ext::sm90
