// Names of the kernels in error messages.
#pragma once

#include "kernels/common/backward/launch_sequence.cuh"

namespace flash_ext::sm90 {

constexpr BackwardKernelNames kBackwardNames = {"sm90/backward rows", "sm90/backward", "sm90/backward dq",
                                                "sm90/backward sink"};

}  // namespace flash_ext::sm90
