// The backward's variant of block masks: the pipelined loop, driven by lists.
//
// A kernel lists the query tiles that see some of a tile of 128 keys, from the mask's rows
// (common/backward/query_lists.h). The 64 keys of a consumer warpgroup lie within one column of blocks. Key tiles come
// longest first (common/scheduler/longest_first.h). The producer writes the metadata of a step when it loads its Q. A
// full step runs the code of the plain loop; in a partial one each lane reads the bits of its pairs, 8 bytes, while
// products run. Where queries see the keys of one warpgroup alone, the other's bits are all 0.
#pragma once

#include "blocks_producer.cuh"
#include "config.cuh"
#include "consumer.cuh"
#include "kernels/common/score/scores.cuh"
#include "kernels/sm90/common/backward/blocks.h"
#include "kernels/sm90/common/backward/dq_layout.cuh"
#include "kernels/sm90/common/backward/kernel.cuh"
#include "names.h"

namespace flash_ext::sm90 {

template <class Config>
using BackwardBlocksRoles =
    BackwardRolesOf<Config, BackwardPipelinedStorage<Config>, BackwardBlocksDq<Config>, BackwardPlainConsumer<Config>>;

template <class Element, int kHeadDim>
void run_backward_blocks(const BackwardParams& p, void* memory, cudaStream_t stream) {
  using Config = BackwardPipelinedConfig<Element, kHeadDim, true>;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  const BackwardBlocksWorkspace all(p, kBlockM, kBlockM, kBlockN, kHeadDim, memory);
  static_assert(Config::kWarpgroups == kListedKeyGroups && kWarpgroupRows == kListedGroupKeys,
                "a step's metadata has the bits of each warpgroup's keys");
  make_query_lists(p, all.rows.query_lists, stream);
  list_longest_first(all.order, all.schedule.list, stream);
  using Rows = BackwardRowKernels<Element, BackwardDqLayout<kHeadDim>, kBlockM, kHeadDim, true>;
  const BackwardStoringMaps maps = storing_maps(p, backward_maps<Config>(p));
  launch_backward_sequence<Rows>(p, all.rows, kBackwardNames, true, stream, [&] {
    launch_backward_kernel<BackwardBlocksRoles<Config>>(kBackwardNames.main, with_hidden_groups(p),
                                                        {maps, all.rows, all.schedule, score_scale(p, kLog2E)},
                                                        all.order.positions(), stream);
  });
}

}  // namespace flash_ext::sm90
