// Attention forward on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = 2^(s_ij - r_i),   l_i = sum_j p_ij
//
// A CTA goes through tiles of kBlockM queries of one head, each from the last tile of keys that it sees to the first.
// Two to four warpgroups compute (consumer.cuh), 64 queries each, and wait for nobody but the loads. The warps of one
// more warpgroup feed them:
//   warp 0  loads K and V through TMA (producer.cuh)
//   warp 1  loads Q, and stores out; with options it loads the bias
//   warp 2  sanitises V; with options it loads V
//   warp 3  makes work tiles, and requeues those that need recomputing (scheduler.cuh)
// A consumer's step, for tile n of the keys, with P of tile n + 1 in registers:
//   wait for K(n); start S = Q K(n)^T; wait for V(n + 1); start O += P V(n + 1)
//   S is there: K(n) is free; 2^(S - r); O is there: V(n + 1) is free; P = 2^(S - r)
// The exponentials hide behind the products of this warpgroup and of the others. So does the end of a tile of queries,
// as Q of the next one is there by then.
//
// The stabiliser r_i need not be the running maximum (FlashAttention-2, algorithm 1) as long as nothing overflows. It
// is the maximum of the first tile in which the row sees a key, and stays, so that the loop has neither a maximum nor a
// rescaling of the output. What overflows leaves an Inf or NaN, or a huge sum, whatever comes after it: sum and out are
// looked at once, at the end (epilogue.cuh), and the CTA then takes the tile of queries again: with V sanitised, as a
// weight of 0 does not hide Inf and NaN; and where that is not all, on the safe path, with the running maximum.
//
// Variants (shape.h) differ in how they traverse the tiles of keys and in what a score goes through:
//   traverse_range.cuh          plain: a range of tiles
//   traverse_from_diagonal.cuh  softcap, ALiBi, any scale: the range, from the diagonal on
//   traverse_listed.cuh         a block mask alone: the tiles of its lists
//   traverse_visible.cuh        bias, masks, dropout: the tiles that masks leave of the range
//
// Barriers (storage.cuh), and who arrives -> who waits:
//   work_tile_full/empty   warp 3 -> all others -> warp 3
//   work_tile_loaded       warp 0 -> warp 3: most of K and V is under way, so the next work tile may be made
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
#include "kernels/ptx/lane.h"
#include "kernels/ptx/setmaxnreg.h"
#include "producer.cuh"
#include "scheduler.cuh"
#include "visible_producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
using ForwardProducerOf = std::conditional_t<Config::kGeneral, ForwardVisibleProducer<Config>, ForwardProducer<Config>>;

/// The lane of a thread: once for all roles, or once for each.
template <class Config>
class Lane {
 public:
  __device__ __forceinline__ int operator()() const {
    if constexpr (Config::kGeneral) {
      return ptx::lane_id();
    } else {
      return lane_;
    }
  }

 private:
  static __device__ __forceinline__ int read() {
    if constexpr (Config::kGeneral) {
      return 0;
    } else {
      return Config::kScoreOptions ? ptx::lane_id() : static_cast<int>(threadIdx.x) % 32;
    }
  }
  const int lane_ = read();
};

/// Variants with options make their first work tile later, and read the lane in each role: the role with the fewest
/// registers else takes both from all.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    forward_kernel(const __grid_constant__ typename ForwardParameters<Config>::Call call,
                   const __grid_constant__ typename ForwardParameters<Config>::Maps maps,
                   const ForwardScheduleOf<Config> schedule,
                   const __grid_constant__ typename ForwardParameters<Config>::Terms terms) {
  constexpr bool kStartsEarly = !Config::kGeneral;
  extern __shared__ __align__(1024) char shared[];
  const ForwardArguments<Config> arguments = {call, maps, terms};
  auto& storage = *reinterpret_cast<ForwardStorageOf<Config>*>(shared + Config::kTilesBytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  const Lane<Config> lane;
  ForwardScheduler<Config> scheduler(call.p, storage);
  if (threadIdx.x == 0) storage.init_barriers();
  if constexpr (kStartsEarly) {
    if (warp == 1 && lane() == 0) {
      maps.prefetch();
      if constexpr (Config::kSplitsKv) ptx::launch_dependents();  // combine_splits_kernel(), which waits by itself
    }
    if (warp == 3 && lane() == 0) scheduler.make_first_work_tile(schedule);
  } else {
    if (threadIdx.x == 0) storage.zero_slots();
  }
  __syncthreads();
  if constexpr (Config::kSplitsKv)
    if (!schedule.taken) ptx::wait_for_previous_grid();  // beside whose end this one starts, up to here
  if (warp < kWarpgroupWarps) {
    ptx::release_registers<Config::kProducerRegisters>();
    ForwardProducerOf<Config>(arguments, storage, shared, lane()).run(warp, scheduler, schedule);
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    const float scale = arguments.scale();
    ForwardConsumer<Config>(arguments, storage, ptx::shared_address(shared), warp / kWarpgroupWarps - 1, lane(), scale)
        .run();
  }
}

/// A persistent grid: each CTA goes through several work tiles.
template <class Config>
void launch_forward(const typename ForwardParameters<Config>::Call& call,
                    const typename ForwardParameters<Config>::Maps& maps, const ForwardScheduleOf<Config>& schedule,
                    const typename ForwardParameters<Config>::Terms& terms, bool overlaps_previous,
                    cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardStorageOf<Config>);
  static_assert(Config::kCtasPerSm * (kSharedBytes + kReservedSharedBytes) <= 228 * 1024, "what an SM has");
  const int64_t ctas = std::min<int64_t>(schedule.size(), ctas_at_a_time(Config::kShape));
  const LaunchShape shape = {dim3(grid_size(ctas)), dim3(Config::kThreads), kSharedBytes, overlaps_previous};
  launch("sm90/forward", forward_kernel<Config>, shape, stream, call, maps, schedule, terms);
}

}  // namespace flash_ext::sm90
