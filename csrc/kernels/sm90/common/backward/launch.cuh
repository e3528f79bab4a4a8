// Launches a call without lists, and lays out the scratch memory that it needs: the same for several kernels.
#pragma once

#include "arguments.cuh"
#include "dq_layout.cuh"
#include "kernels/common/backward/launch_sequence.cuh"
#include "kernels/common/backward/split_sums.cuh"
#include "kernels/common/score/scores.cuh"

namespace flash_ext::sm90 {

/// Scratch memory of a call: the workspace, and after it the schedule's.
template <class Config>
struct BackwardMemory {
  BackwardWorkspace workspace;
  BackwardSchedule schedule;
  int64_t bytes;

  BackwardMemory(const BackwardParams& p, void* memory)
      : workspace(p, Config::kBlockM, Config::kBlockN, Config::kDqHeadDim, memory),
        schedule(p, Config::kBlockN, Config::kHeadDim, false, static_cast<char*>(memory) + workspace.bytes),
        bytes(workspace.bytes + schedule.bytes) {
    if (Config::kFirstTurnsStore) workspace.let_first_turns_store(p);
    if (!Config::kZeroesDq || schedule.listing.listed) return;
    const int64_t num_sms = device_attribute(cudaDevAttrMultiProcessorCount);
    workspace.leave_dq_to_main_kernel(p, schedule.order, Config::kCluster * kWarpgroupWarps, num_sms / Config::kCluster,
                                      0);
  }
};

/// Launches all kernels of a call; launch_main(arguments) launches the main one. kPermuted: row terms are permuted
/// (row_terms.cuh). The kernels after the main one may start before it has ended.
template <class Config, bool kPermuted, class LaunchMain>
void launch_backward(const BackwardParams& p, void* memory, const BackwardKernelNames& names, cudaStream_t stream,
                     LaunchMain launch_main) {
  using Element = typename Config::Element;
  const BackwardMemory<Config> all(p, memory);
  fill_work_list(p, all.schedule.listing, all.schedule.list, stream);
  using Rows =
      BackwardRowKernels<Element, BackwardDqLayout<Config::kDqHeadDim>, Config::kBlockM, Config::kDqHeadDim, kPermuted>;
  launch_backward_sequence<Rows>(p, all.workspace, names, true, stream, [&] {
    launch_main(BackwardArguments{backward_maps<Config>(p), all.workspace, all.schedule, score_scale(p, kLog2E)});
    combine_splits<Element, Config::kBlockM, Config::kBlockN, Config::kHeadDim>(p, all.schedule, true, stream);
  });
}

}  // namespace flash_ext::sm90
