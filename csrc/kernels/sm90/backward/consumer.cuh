// The consumer warpgroups of the pipelined loop without options.
#pragma once

#include "kernels/sm90/common/backward/pipelined_consumer.cuh"
#include "storage.cuh"

namespace flash_ext::sm90 {

template <class Config>
using BackwardPlainConsumer =
    BackwardPipelinedConsumer<Config, BackwardPlainScores<Config, BackwardPipelinedStorage<Config>>>;

}  // namespace flash_ext::sm90
