// Attention forward in float32 on wgmma:   out_i = sum_j p_ij v_j / l_i,   p_ij = e^(s_ij - r_i),   l_i = sum_j p_ij
//
// A float is the sum of three bfloat16, and a product of floats the sum of six products of bfloat16
// (sm90/common/float_parts.cuh). A CTA has kBlockM queries of one head and visits tiles of 64 or 32 keys, from the last
// one that the queries see to the first. Two or three consumer warpgroups have 64 queries each. One more warpgroup
// reads K and V, splits them, and fills a ring of subtiles, which have as many columns as a tile has keys. A step of a
// consumer warpgroup:
//   for each subtile of K: wait for it; S += Q K^T, in several sums: of the largest products, and of the others
//   S is complete: r = max, P = e^(S - r) in registers, split
//   for each subtile of V: wait for it; its columns of P V, from zero; O = O e^(old r - r) + P V in these columns
// A subtile is released when its products are complete.
// While one warpgroup computes its exponentials, tensor cores work for the others.
//
// Tensor cores round sums towards zero. So no sum in them extends over more than the head dim or 64 keys.
#pragma once

#include "consumer.cuh"
#include "kernels/launch.h"
#include "kernels/ptx/setmaxnreg.h"
#include "kernels/sm90/common/score_options.h"
#include "kernels/sm90/common/shared_memory.h"
#include "producer.cuh"

namespace flash_ext::sm90 {

/// Warpgroup 0 is the producer, the others are consumers.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_f32_kernel(const __grid_constant__ ForwardParams p, const ForwardSchedule schedule,
                       const __grid_constant__ ScoreFactors factors) {
  extern __shared__ __align__(1024) char shared[];
  auto& storage = *reinterpret_cast<ForwardF32Storage<Config>*>(shared + Config::kTilesBytes);
  if (threadIdx.x == 0) storage.init();
  __syncthreads();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroupThreads, 0) - 1;
  if (group < 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    using Producer =
        std::conditional_t<Config::kSmallSubtiles, ForwardF32RowProducer<Config>, ForwardF32Producer<Config>>;
    Producer(p, storage, shared + Config::kRingOffset, thread_of_warpgroup()).run(schedule);
  } else {
    ptx::acquire_registers<Config::kRegisters>();
    ForwardF32Consumer<Config>(p, factors, storage, shared, group).run(shared + group * Config::kQueryBytes);
  }
}

template <class Config>
void launch_forward_f32(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  constexpr size_t kSharedBytes = Config::kTilesBytes + sizeof(ForwardF32Storage<Config>);
  static_assert(kSharedBytes <= kMaxSharedBytes);
  const WorkListPlan list = forward_work_list(p, Config::kBlockM);
  const ForwardSchedule schedule = schedule_forward_f32<Config>(p, list, workspace);
  if (list.listed) {
    fill_work_list(p, list, schedule.list, stream);
  } else if (workspace) {
    zero_forward_workspace(workspace, stream);
  }
  const int64_t ctas = std::min<int64_t>(schedule.work_tiles, device_attribute(cudaDevAttrMultiProcessorCount));
  LaunchShape shape = {grid_of(ctas), dim3(Config::kThreads), kSharedBytes};
  shape.overlaps_previous = workspace != nullptr;
  launch("sm90/forward_f32", forward_f32_kernel<Config>, shape, stream, p, schedule,
         ScoreFactors(p, ScoreUnit<float>::kPerNatural));
}

template <int kHeadDim>
void run_forward_f32(const ForwardParams& p, void* workspace, cudaStream_t stream) {
  has_score_options(p.softcap, p.alibi_slopes != nullptr, p.softmax_scale)
      ? launch_forward_f32<ForwardF32Config<kHeadDim, true>>(p, workspace, stream)
      : launch_forward_f32<ForwardF32Config<kHeadDim, false>>(p, workspace, stream);
}

}  // namespace flash_ext::sm90
