// Names of the kernels in error messages.
#pragma once

#include "kernels/common/backward/launch_sequence.cuh"

namespace flash_ext::sm80 {

constexpr BackwardKernelNames kBackwardNames = {"sm80/backward rows", "sm80/backward", "sm80/backward dq",
                                                "sm80/backward sink"};

}  // namespace flash_ext::sm80
