// The backward's pipelined loop: the products of a step overlap those of the next (sm90/common/backward/kernel.cuh
// has the equations and the kernel, sm90/common/backward/pipelined_consumer.cuh the loop). Its policies:
//
//   plain                      consumer.cuh, producer.cuh
//   one option, or two of some options_kernel.cuh
//   the lists of a block mask  blocks_kernel.cuh
#pragma once

#include "config.cuh"
#include "consumer.cuh"
#include "kernels/sm90/common/backward/launch.cuh"
#include "options_kernel.cuh"
#include "producer.cuh"

namespace flash_ext::sm90 {

template <class Config>
using BackwardPipelinedRoles = BackwardRolesOf<Config, BackwardPipelinedStorage<Config>, BackwardPipelinedDq<Config>,
                                               BackwardPlainConsumer<Config>>;

template <class Element, int kHeadDim>
int64_t backward_bytes(const BackwardParams& p) {
  return BackwardMemory<BackwardPipelinedConfig<Element, kHeadDim>>(p, nullptr).bytes;
}

template <class Element, int kHeadDim>
void run_backward(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardPipelinedConfig<Element, kHeadDim>;
  launch_backward<Config, true>(p, memory, kBackwardNames, stream, [&](const BackwardArguments& arguments) {
    if (has_options(p)) return launch_pipelined_options<Config>(p, arguments, stream);
    const BackwardStoringMaps maps = storing_maps(p, arguments.maps);
    launch_backward_kernel<BackwardPipelinedRoles<Config>>(
        kBackwardNames.main, p, {maps, arguments.workspace, arguments.schedule, arguments.scale},
        arguments.schedule.positions(), stream);
  });
}

}  // namespace flash_ext::sm90
